"""Gates: MCP, HTTP, and the assembly of host, dispatcher and worker. See `docs/design/serve.md`."""

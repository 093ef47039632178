"""The tool dispatcher: the layer between an agent's loop and its tools. See `docs/design/dispatch.md`."""

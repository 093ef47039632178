import importlib

plugin = importlib.import_module("plugins.reverse")


def job(text: str) -> str:
    return plugin.run(text)

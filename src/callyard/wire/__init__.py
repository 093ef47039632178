"""The protocol between a worker and its executors: frames, messages, codec. Pure: bytes in, values out."""

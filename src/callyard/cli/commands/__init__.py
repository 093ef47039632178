"""Each command's arguments and options; what it does is imported when it runs."""

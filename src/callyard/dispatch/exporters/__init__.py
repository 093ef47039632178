"""Who tells the world of calls: log lines, OpenTelemetry, the audit file. Each is a subscriber of the `EventHub`."""

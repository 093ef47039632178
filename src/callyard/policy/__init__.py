"""Pure rules, one a module: numbers in, a decision out. No IO, no clock."""

"""The configuration: one small file per section of the YAML, `cli_args` is the public door."""

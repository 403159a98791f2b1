"""The configuration, a file per group of YAML sections; import it from `areal.api.cli_args`."""

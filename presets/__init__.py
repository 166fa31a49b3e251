"""Complete run configurations, one TOML file each, and the packaged prompt files."""

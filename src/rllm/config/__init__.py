"""Settings files: `yaml_file` reads them, bounded and with the line of each setting."""

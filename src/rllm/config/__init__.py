"""Settings at the bottom layer, so that every layer may import them typed.

`schema` has every setting of a run; `loading` makes a configuration of files, environment and overrides; `yaml_file`
reads a file within bounds; `reference` describes the settings; `sizes` derives learning rates, memory and the sizes of
a step; `sampling` has the parameters and seeds that a run imposes on model calls.
"""

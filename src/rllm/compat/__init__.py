"""Vocabulary of the rLLM framework: its module paths, its configuration keys and a few classes of its own.

`import_hook` resolves module paths that moved and explains those that were removed. `settings` translates
configurations by the rules of `setting_table`; `rllm.config.loading` calls it at one place. `metric_names` adds
metrics under its names. Only programs written for that framework use the others: `class_names`,
`chat_template_parser` and `proxy_manager`.
"""

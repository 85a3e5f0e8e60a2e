"""SGLang servers that run already: what they are asked and told beside their answers."""

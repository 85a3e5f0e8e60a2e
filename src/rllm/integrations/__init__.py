"""Where a base URL is not enough: bridges to other software, each in a module that loads only when it is named."""

"""TokenFlow's engine side: the contract with the gateway, and the plugin that runs inside SGLang."""

"""The bodies of requests and answers, as clients of OpenAI and of vLLM know them."""

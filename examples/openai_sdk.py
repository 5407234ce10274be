# ruff: noqa: T201 - a script that prints
"""A script for the OpenAI SDK as anybody has it; only the base URL is TokenFlow's.

    python examples/openai_sdk.py "Why is the sky blue?"

OPENAI_BASE_URL names another gateway, MODEL another model than the first one the gateway lists.
"""

import os
import sys

import openai

client = openai.OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8080/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = os.environ.get("MODEL") or client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": " ".join(sys.argv[1:]) or "Why is the sky blue?"}],
    stream=True,
)
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        print(chunk.choices[0].delta.content, end="", flush=True)
print()

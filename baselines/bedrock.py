"""Amazon Bedrock through its own SDK: `converse_stream`, in one attempt.

Credentials are those that boto3 finds in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), the region in
AWS_REGION; they go nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

REQUIRES = ("boto3",)


UNSIGNED = "local"
"""What a server of one's own is asked with: the SDK signs every request, and that server reads no signature."""


class Converse:
    """`converse_stream`."""

    needs: tuple[str, ...] = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION")
    local = False

    def connect(self, url: str | None, timeout_s: float) -> None:
        """A client: of the provider, or of a server on this machine."""
        import boto3
        from botocore.config import Config

        config = Config(
            retries={"total_max_attempts": 1}, read_timeout=timeout_s, connect_timeout=timeout_s, proxies={}
        )
        own: dict[str, Any] = {"region_name": os.environ.get("AWS_REGION", "us-east-1")}
        if url is not None:
            own = {
                "region_name": "us-east-1",
                "endpoint_url": url,
                "aws_access_key_id": UNSIGNED,
                "aws_secret_access_key": UNSIGNED,
            }
        else:
            config = Config(retries={"total_max_attempts": 1}, read_timeout=timeout_s, connect_timeout=timeout_s)
        self._region = own["region_name"]
        self._client: Any = boto3.client("bedrock-runtime", config=config, **own)

    def close(self) -> None:
        """Ends the client's connections."""
        self._client.close()

    def ask(self, model: str, prompt: str, output: int) -> Iterator[dict[str, Any]]:
        """What comes, one thing at a time."""
        response = self._client.converse_stream(
            modelId=model,
            messages=[{"role": "user", "content": [{"text": prompt}]}],
            inferenceConfig={"maxTokens": output},
        )
        yield {"headers": {}, "model": model, "region": self._region}
        for event in response["stream"]:
            if "contentBlockDelta" in event:
                text = event["contentBlockDelta"]["delta"].get("text")
                if text:
                    yield {"text": text}
            elif "messageStop" in event:
                yield {"end": True}
            elif "metadata" in event:
                own = event["metadata"]
                yield {
                    "headers": {"latency-ms": str(own.get("metrics", {}).get("latencyMs", ""))},
                    "usage": {
                        "prompt": own["usage"]["inputTokens"],
                        "output": own["usage"]["outputTokens"],
                        "cached": own["usage"].get("cacheReadInputTokens"),
                    },
                }


def converse(case: Any) -> Converse:
    """`client.converse_stream`."""
    return Converse()


IMPLEMENTATIONS = {"endpoint": {"bedrock_converse": converse}}

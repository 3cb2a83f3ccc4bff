"""What a vLLM engine in this process is told: a YAML file.

    model: /models/Qwen3-4B
    engine_args: {dtype: bfloat16, max_model_len: 8192}
    environment: {VLLM_LOGGING_LEVEL: WARNING}
    cpu: false

Invariant: an unknown key is an error that names it; unknown engine arguments are vLLM's to refuse.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

CPU_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Without it the first request waits for a compiler for many seconds.
    "TORCHDYNAMO_DISABLE": "1",
}

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    # A service's stdout is for the lines that scripts read.
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}


class VllmConfig(BaseModel):
    """One engine."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = Field(min_length=1, description="Folder of the model, or its name on a hub.")
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of vLLM's AsyncEngineArgs, by their Python names."
    )
    environment: dict[str, str] = Field(
        default_factory=dict, description="Variables for vLLM, unless the environment has them already."
    )
    cpu: bool = Field(False, description="Run without a GPU, on our worker whose sleep really frees memory.")
    spool: Path | None = Field(
        None, description="Folder for weights that arrive as bytes, until they are loaded; default: that of the system."
    )

    @classmethod
    def load(cls, path: Path) -> VllmConfig:
        """Read a file; ValueError with one line for a person."""
        try:
            return cls.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: cannot be read: {error}") from error
        except yaml.YAMLError as error:
            raise ValueError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(str(part) for part in problem["loc"])
            raise ValueError(f"{path}: {where}: {problem['msg']}") from error

    def arguments(self) -> dict[str, Any]:
        """Return the engine arguments with what we add where nothing else was said."""
        ours: dict[str, Any] = {
            "model": self.model,
            # Requests come and go as token ids.
            "skip_tokenizer_init": True,
        }
        if self.cpu:
            ours |= {
                "worker_cls": "services.engine.vllm.worker.SleepingCpuWorker",
                "weight_transfer_config": {"backend": "file"},
                "enforce_eager": True,
                # Refused without a GPU; our worker needs no permission.
                "enable_sleep_mode": False,
            }
        else:
            ours |= {
                "worker_extension_cls": "services.engine.vllm.extension.WorkerExtension",
                "enable_sleep_mode": True,
            }
        return ours | self.engine_args

    def variables(self) -> dict[str, str]:
        """Return what the environment gets where it has nothing else."""
        return ENVIRONMENT | (CPU_ENVIRONMENT if self.cpu else {}) | self.environment

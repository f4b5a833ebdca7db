"""Mixed into vLLM's workers, so that they read weights from buckets."""

from __future__ import annotations

from typing import Any

from .buckets import Bucket, read_bucket


class WeightReader:
    """vLLM finds the class by its name, in whatever process a worker is."""

    def read_weights(self: Any, bucket: Bucket, first: bool) -> None:
        """One bucket of an update, which vLLM takes layer by layer, and as a whole."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            if first:
                initialize_layerwise_reload(model)
            model.load_weights(read_bucket(bucket))

    def finish_weights(self: Any) -> None:
        """The last bucket has been read. Adapters, and what was cached of inputs, are dropped."""
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        runner = self.model_runner
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(runner.get_model(), self.vllm_config.model_config)
        runner.reset_lora_state()
        runner.reset_encoder_cache()
        runner.reset_mm_cache()
        if torch.cuda.is_initialized():  # copies of what came are not needed any more
            torch.cuda.empty_cache()

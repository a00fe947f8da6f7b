"""The table's rows for transformers' TrainingArguments (4.57 and 5.24; Seq2Seq's too)."""

from __future__ import annotations

from lumen.config.table import HF, Key, noop, refuse

_ONE_PROCESS = "one process trains, so there is nothing to distribute"
_OWN_LOADER = "rows are tokenised beforehand and read from a memory map; there is no worker to configure"
_NO_HUB = "nothing is uploaded; push the finished folder with `hf upload`"

ROWS: list[Key] = [
    # ---- one process ------------------------------------------------------------------------------------------------
    *noop(HF, "on one process ZeRO has nothing to shard and its CPU offload is not applied; gradient checkpointing, "
          "packing and `quant:` save memory", deepspeed=None),
    *noop(HF, _ONE_PROCESS, ddp_timeout=1800, ddp_backend=None, ddp_bucket_cap_mb=None, ddp_broadcast_buffers=None,
          ddp_find_unused_parameters=None, ddp_static_graph=None, local_rank=-1, log_on_each_node=True,
          save_on_each_node=False, log_level_replica="warning", average_tokens_across_devices=True,
          accelerator_config=None, mp_parameters="", ray_scope="last", eval_use_gather_object=False),
    *refuse(HF, "sharded training is not built yet; one process trains on one device",
            fsdp=None, parallelism_config=None),
    *noop(HF, "it belongs to fsdp, which is off",
          fsdp_config=None, fsdp_min_num_params=0, fsdp_transformer_layer_cls_to_wrap=None),
    *refuse(HF, "TPUs are not supported", tpu_num_cores=None, tpu_metrics_debug=False),
    # ---- loader -----------------------------------------------------------------------------------------------------
    *noop(HF, _OWN_LOADER, dataloader_num_workers=0, dataloader_pin_memory=True, dataloader_persistent_workers=False,
          dataloader_prefetch_factor=None, dataloader_multiprocessing_context=None, dataloader_in_order=True),
    *noop(HF, "Lumen's rows hold only what the model needs", remove_unused_columns=True, label_names=None),
    *noop(HF, "lengths are counted from the tokens themselves", length_column_name="length"),
    *refuse(HF, "resuming always continues at the exact row", ignore_data_skip=False),
    *refuse(HF, "batch sizes are not searched; `lumen train --dry-run` estimates the memory",
            auto_find_batch_size=False),
    # ---- loss and optimizer -----------------------------------------------------------------------------------------
    *refuse(HF, "label smoothing is not built", label_smoothing_factor=0.0),
    *refuse(HF, "noisy embeddings (NEFTune) are not built", neftune_noise_alpha=None),
    *refuse(HF, "use optim: adamw_torch", adafactor=False),
    *refuse(HF, "AdamW's settings have their own keys: adam_beta1, adam_beta2, adam_epsilon, weight_decay",
            optim_args=None),
    *refuse(HF, "it belongs to optimizers that are not built", optim_target_modules=None),
    # ---- precision, kernels, memory ---------------------------------------------------------------------------------
    *noop(HF, "evaluation runs in the training dtype", bf16_full_eval=False, fp16_full_eval=False),
    *noop(HF, "fp32 matrix products follow torch's own setting", tf32=None),
    *noop(HF, "PyTorch's own mixed precision is used; Apex is not",
          fp16_backend="auto", half_precision_backend="auto", fp16_opt_level="O1"),
    *noop(HF, "checkpointing here never needs the re-entrant form",
          gradient_checkpointing_kwargs=None, activation_checkpointing_kwargs=None),
    *noop(HF, "each decoder layer is compiled with Lumen's own settings",
          torch_compile_backend=None, torch_compile_mode=None, torchdynamo=None),
    *noop(HF, "fused loss and kernels are chosen by Lumen's registry",
          use_liger_kernel=False, liger_kernel_config=None),
    *noop(HF, "training never keeps a KV cache", use_cache=False),
    *noop(HF, "memory is not emptied between steps; it costs time and saves none at the peak",
          torch_empty_cache_steps=None),
    *noop(HF, "the device is chosen by `device`; MPS and IPEX are not used",
          use_mps_device=False, use_ipex=False, jit_mode_eval=False),
    *noop(HF, "a run is repeatable from its seed and resumes bit for bit", full_determinism=False),
    # ---- logging ----------------------------------------------------------------------------------------------------
    *noop(HF, "messages go to standard error, metrics to metrics.jsonl", log_level="passive", debug=""),
    *noop(HF, "non-finite losses are always shown, and their steps skipped", logging_nan_inf_filter=True),
    *noop(HF, "real tokens are always counted and reported", include_num_input_tokens_seen=False,
          include_tokens_per_second=False),
    *noop(HF, "memory is always reported", skip_memory_metrics=True),
    *noop(HF, "only Trackio reads it", project="huggingface", trackio_space_id=None, trackio_bucket_id=None,
          trackio_static_space_id=None),
    # ---- evaluation and prediction ----------------------------------------------------------------------------------
    *noop(HF, "evaluation reduces batch by batch and never gathers logits", prediction_loss_only=False,
          eval_accumulation_steps=None, eval_do_concat_batches=True, batch_eval_metrics=False,
          use_legacy_prediction_loop=False, past_index=-1),
    *refuse(HF, "evaluation starts at its first due step", eval_delay=0),
    *refuse(HF, "evaluation measures loss, perplexity and token accuracy only", include_for_metrics=None,
            include_inputs_for_metrics=False),
    *refuse(HF, "predictions are written by `lumen generate --prompts FILE`", do_predict=False,
            predict_with_generate=False, generation_config=None),
    *noop(HF, "it belongs to predict_with_generate, which is off", generation_max_length=None,
          generation_num_beams=None, sortish_sampler=False),
    # ---- checkpoints and the hub ------------------------------------------------------------------------------------
    *refuse(HF, "only safetensors are written, no pickle; leave it out", save_safetensors=True),
    *noop(HF, "SIGTERM always saves a checkpoint and leaves", enable_jit_checkpoint=False),
    *noop(HF, "everything a run needs is restored", restore_callback_states_from_checkpoint=False),
    *refuse(HF, _NO_HUB, push_to_hub=False),
    *noop(HF, _NO_HUB, hub_token=None, hub_private_repo=None, hub_model_id=None, hub_strategy="every_save",
          hub_always_push=False, hub_revision=None, push_to_hub_model_id=None, push_to_hub_organization=None,
          push_to_hub_token=None),
]  # fmt: skip

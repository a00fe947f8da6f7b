"""The one table of foreign keys: LLaMA-Factory 0.9.6, transformers 4.57 and 5.24 (Seq2SeqTrainingArguments).

Keys that are fields of the configuration need no row: they act.  The rest stand here, and a test holds that every key
of those tools is one or the other, and no key is both.
"""

from __future__ import annotations

from lumen.config.table import HF, LF, OLD, OWN, Key, acts, noop, refuse

RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "cache_path": "tokenized_path",
    "new_special_tokens": "add_special_tokens",
    "checkpoint_dir": "adapter_name_or_path",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "activation_checkpointing": "gradient_checkpointing",
    "early_stopping_patience": "early_stopping_steps",
    "max_seq_length": "cutoff_len",
}
"""Old or other names of our fields, accepted with a note."""

_ROWS: list[Key] = [
    # ---- Lumen's own sections that later versions have ------------------------------------------------------------
    *refuse(OWN, "this section is not built yet; its flat keys are (`lumen config keys`)",
            memory=None, distributed=None, hygiene=None),
    # ---- read as a field ------------------------------------------------------------------------------------------
    *acts(
        LF,
        quantization_bit="quant.recipe: 4 is nf4, 8 is int8-weight-only",
        quantization_method="quant.recipe, with quantization_bit; bnb or bitsandbytes only",
        quantization_type="quant.recipe, with quantization_bit; nf4 only",
        double_quantization="quant.recipe, with quantization_bit; false drops +dq from nf4",
        device_map="device; auto changes nothing",
        disable_flash_attn="flash_attn: disabled",
    ),
    *acts(
        HF,
        use_cpu="device: cpu",
        no_cuda="device: cpu",
        do_eval="val_size or eval_dataset, which are always evaluated at the end; needs one of them",
        torch_compile="compile: on",
        attn_implementation="flash_attn",
        logging_strategy="logging_steps; epoch is refused, no is never",
    ),
    # ---- LLaMA-Factory: model ---------------------------------------------------------------------------------------
    *noop(LF, "adapters are given by their directory; a folder setting has nothing to add", adapter_folder=None),
    *noop(LF, "transformers 5 has fast tokenizers only", use_fast_tokenizer=True),
    *noop(LF, "weights are always streamed in, one tensor at a time", low_cpu_mem_usage=True),
    *noop(LF, "checkpointing here never needs the re-entrant form", use_reentrant_gc=True),
    *noop(LF, "the loss never holds full logits, so there is nothing to upcast", upcast_lmhead_output=False),
    *noop(LF, "fused loss and kernels are chosen by `lumen kernels`, not by a patch", enable_liger_kernel=False),
    *noop(LF, "Unsloth's patches are not used; checkpointing per layer is on by default",
          use_unsloth=False, use_unsloth_gc=False),
    *noop(LF, "kernels are chosen by Lumen's own registry (`lumen kernels`)", use_v1_kernels=False),
    *noop(LF, "chat and generate use Lumen's own engine", infer_backend="huggingface"),
    *noop(LF, "generation always keeps a KV cache, training never", use_kv_cache=True),
    *noop(LF, "trainable parameters are printed at the start of every run", print_param_status=False),
    *noop(LF, "nothing is fetched from that hub", ms_hub_token=None, om_hub_token=None),
    *noop(LF, "one device holds the model, so nothing is offloaded to a folder", offload_folder="offload"),
    *noop(LF, "only vLLM reads it; Lumen's chat has its own engine",
          vllm_maxlen=4096, vllm_gpu_util=0.7, vllm_enforce_eager=False, vllm_max_lora_rank=32, vllm_config=None),
    *noop(LF, "only SGLang reads it; Lumen's chat has its own engine",
          sglang_maxlen=4096, sglang_mem_fraction=0.7, sglang_tp_size=-1, sglang_config=None,
          sglang_lora_backend="triton"),
    *noop(LF, "only text is trained; there are no images, videos or sounds to prepare",
          image_max_pixels=589824, image_min_pixels=1024, image_do_pan_and_scan=False, crop_to_patches=False,
          video_max_pixels=65536, video_min_pixels=256, video_fps=2.0, video_maxlen=128, use_audio_in_video=False,
          audio_sampling_rate=16000, media_dir=None, freeze_vision_tower=True, freeze_multi_modal_projector=True),
    *refuse(LF, "only text models are trained, so freezing the language model leaves nothing",
            freeze_language_model=False),
    *refuse(LF, "described initialisation of new tokens is not built; use add_special_tokens (they start as the mean)",
            new_special_tokens_config=None, init_special_tokens="noise_init"),
    *refuse(LF, "set rope_scaling in the model's config.json, so that every engine reads the same", rope_scaling=None),
    *refuse(LF, "text in the data never becomes a control token, so there is nothing to split",
            split_special_tokens=False),
    *refuse(LF, "shifted sparse attention changes the model; use packing with full attention", shift_attn=False),
    *refuse(LF, "mixture of depths changes the architecture and is not built", mixture_of_depths=None),
    *refuse(LF, "set router_aux_loss_coef in the model's config.json", moe_aux_loss_coef=None),
    *refuse(LF, "device placement of a quantised base is Lumen's own; use `device`", quantization_device_map=None),
    *refuse(LF, "KTransformers is not supported; freeze or quantise the experts instead (`quant.rules`)",
            use_kt=False, kt_weight_path=None, kt_expert_checkpoint_path=None, kt_use_lora_experts=None,
            kt_lora_expert_num=None, kt_lora_expert_intermediate_size=None, kt_optimize_rule=None,
            cpu_infer=32, chunk_size=8192, kt_maxlen=4096, kt_use_cuda_graph=True, kt_mode="normal",
            kt_force_think=False),
    # ---- LLaMA-Factory: data ----------------------------------------------------------------------------------------
    *noop(LF, "rows are read and tokenised by Lumen's own reader, which picks its own parallelism",
          preprocessing_num_workers=None, preprocessing_batch_size=1000, data_shared_file_system=False),
    *noop(LF, "padding is never learned", ignore_pad_token_for_loss=True),
    *noop(LF, "the buffer of a streamed dataset; datasets here are indexed, not streamed", buffer_size=16384),
    *refuse(LF, "streaming is not built; rows are read in chunks and their tokens live on disk, so leave it out",
            streaming=False),
    *refuse(LF, "beam search is not built; generation samples", eval_num_beams=None),
    *refuse(LF, "several held-out sets are reported as one; evaluate them with one `lumen eval` each",
            eval_on_each_dataset=False),
    *refuse(LF, "the template decides how tools are written; choose `template`", tool_format=None),
    *refuse(LF, "reasoning of earlier turns follows the template", preserve_thinking=False),
    # ---- LLaMA-Factory: fine-tuning ---------------------------------------------------------------------------------
    *noop(LF, "a PiSSA adapter is always saved as the plain LoRA of the unchanged base", pissa_convert=False),
    *refuse(LF, "orthogonal fine-tuning (OFT) is not built; use finetuning_type: lora",
            module_dropout=0.0, oft_rank=0, oft_block_size=32, oft_target="all"),
    *refuse(LF, "block expansion (LLaMA Pro) is not built; use finetuning_type: freeze", use_llama_pro=False),
    *refuse(LF, "this optimizer is not built; AdamW is (`optim: adamw_torch`)",
            use_galore=False, use_apollo=False, use_badam=False, use_adam_mini=False, use_muon=False),
    *noop(LF, "it belongs to use_galore, which is off", galore_target="all", galore_rank=16,
          galore_update_interval=200, galore_scale=2.0, galore_proj_type="std", galore_layerwise=False),
    *noop(LF, "it belongs to use_apollo, which is off", apollo_target="all", apollo_rank=16,
          apollo_update_interval=200, apollo_scale=32.0, apollo_proj="random", apollo_proj_type="std",
          apollo_scale_type="channel", apollo_layerwise=False, apollo_scale_front=False),
    *noop(LF, "it belongs to use_badam, which is off", badam_mode="layer", badam_start_block=None,
          badam_switch_mode="ascending", badam_switch_interval=50, badam_update_ratio=0.05,
          badam_mask_mode="adjacent", badam_verbose=0),
    *refuse(LF, "this loss is not built; stage: sft learns by cross-entropy",
            use_dft_loss=False, use_asft_loss=False, use_eaft_loss=False),
    *noop(LF, "it belongs to a loss that is off", asft_alpha=0.1, eaft_alpha=1.0),
    *noop(LF, "preference and reward training (stage dpo, kto, rm, ppo) is not built yet; other stages do not read it",
          pref_beta=0.1, pref_ftx=0.0, pref_bco_weight=0.0, pref_loss="sigmoid", dpo_label_smoothing=0.0,
          kto_chosen_weight=1.0, kto_rejected_weight=1.0, simpo_gamma=0.5, ppo_buffer_size=1, ppo_epochs=4,
          ppo_score_norm=False, ppo_target=6.0, ppo_whiten_rewards=False, ref_model=None, ref_model_adapters=None,
          ref_model_quantization_bit=None, reward_model=None, reward_model_adapters=None,
          reward_model_quantization_bit=None, reward_model_type="lora", ld_alpha=None),
    *refuse(LF, "SwanLab is not supported; metrics.jsonl and report_to: tensorboard are", use_swanlab=False),
    *noop(LF, "it belongs to use_swanlab, which is off", swanlab_project="llamafactory", swanlab_workspace=None,
          swanlab_run_name=None, swanlab_mode="cloud", swanlab_api_key=None, swanlab_logdir=None,
          swanlab_lark_webhook_url=None, swanlab_lark_secret=None),
    *noop(LF, "token accuracy is always measured in evaluation", compute_accuracy=False),
    *noop(LF, "real tokens per second are always reported", include_effective_tokens_per_second=False),
    # ---- LLaMA-Factory: generation, export, evaluation --------------------------------------------------------------
    *noop(LF, "max_new_tokens decides the length", max_length=1024),
    *refuse(LF, "beam search is not built; generation samples", num_beams=1),
    *noop(LF, "only beam search reads it", length_penalty=1.0),
    *refuse(LF, "only safetensors are written, no pickle; leave it out", export_legacy_format=False),
    *refuse(LF, "GPTQ is not built; export_format: int4 (W4A16), int8 or w8a16 quantise the merged model",
            export_quantization_bit=None),
    *noop(LF, "it belongs to export_quantization_bit, which is off", export_quantization_dataset=None,
          export_quantization_nsamples=128, export_quantization_maxlen=1024),
    *refuse(LF, "nothing is uploaded; push export_dir with `hf upload`", export_hub_model_id=None),
    *refuse(LF, "benchmarks by task are not built; `lumen eval` measures held-out loss and shows generations",
            task=None, task_dir="evaluation", lang="en", n_shot=5, save_dir=None, batch_size=4,
            download_mode="reuse_dataset_if_exists"),
    # ---- LLaMA-Factory: launchers and backends ----------------------------------------------------------------------
    *noop(LF, "Ray is not used; one process trains", ray_run_name=None, ray_storage_path="./saves",
          ray_storage_filesystem=None, ray_num_workers=1, resources_per_worker={"GPU": 1}, placement_strategy="PACK",
          ray_init_kwargs=None, master_addr=None, master_port=None),
    *refuse(LF, "use `quant: {recipe: ...}`; `lumen config schema` lists the recipes", fp8=False),
    *noop(LF, "it belongs to fp8, which is off", fp8_backend="auto", fp8_enable_fsdp_float8_all_gather=False),
    *refuse(LF, "profiling is not built; run the command under torch.profiler", enable_torch_profiler=False),
    *noop(LF, "it belongs to enable_torch_profiler, which is off", profiler_output_dir=None, profiler_wait_steps=1,
          profiler_warmup_steps=1, profiler_active_steps=1, profiler_repeat=1, profiler_record_shapes=True,
          profiler_profile_memory=True, profiler_with_stack=True, profile_modules=None),
    *refuse(LF, "this backend is not supported; Lumen has its own loop", use_mca=False, use_hyper_parallel=False,
            hyper_parallel_args=None),
    *refuse(LF, "Megatron's parallelism is not built; one process trains on one device",
            tensor_model_parallel_size=1, pipeline_model_parallel_size=1, expert_model_parallel_size=1,
            context_parallel_size=1, virtual_pipeline_model_parallel_size=None, sequence_parallel=False,
            megatron_pretrained_checkpoint=None,
            export_hf_on_finish=False, extra_config=None, use_packed_sequences=False),
    *noop(LF, "only Megatron reads it", recompute_granularity=None, recompute_method=None, recompute_num_layers=None,
          account_for_embedding_in_pipeline_split=None, account_for_loss_in_pipeline_split=None,
          bias_activation_fusion=None, apply_rope_fusion=None, masked_softmax_fusion=None,
          cross_entropy_loss_fusion=None, moe_grouped_gemm=None, moe_token_dispatcher_type=None,
          calculate_per_token_loss=None, use_distributed_optimizer=True, overlap_param_gather=True,
          overlap_grad_reduce=True, mixed_precision="bf16_mixed"),
]  # fmt: skip


def foreign_keys() -> dict[str, Key]:
    """Every row by name."""
    from lumen.config.keys_hf import ROWS as hf_rows

    renamed = [Key(old, OLD, "acts", f"renamed: read as {new}") for old, new in RENAMED.items()]
    rows = [*_ROWS, *hf_rows, *renamed]
    table = {row.name: row for row in rows}
    assert len(table) == len(rows), "a key stands in the table twice"
    return table

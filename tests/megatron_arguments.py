"""Arguments of Megatron-LM that `settings.SETTINGS` has no row for, by why not; families by what begins or ends their names."""

from __future__ import annotations

READ_ELSEWHERE = """
num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups group_query_attention kv_channels vocab_size padded_vocab_size
max_position_embeddings seq_length num_experts moe_ffn_hidden_size moe_layer_freq moe_shared_expert_intermediate_size moe_shared_expert_gate
moe_aux_loss_coeff add_qkv_bias qk_layernorm untie_embeddings_and_output_weights tokenizer_type
tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size expert_model_parallel_size
expert_tensor_parallel_size context_parallel_size data_parallel_size world_size rank moe_extended_tp iteration
"""
"""They make a config.json, or join files; sizes are compared with it by heads or by shapes."""

SHOWN_BY_TENSORS = """
q_lora_rank kv_lora_rank hybrid_.* mamba_.* linear_(conv_kernel_dim|key_head_dim|num_key_heads|num_value_heads|value_head_dim)
mtp_hybrid_override_pattern moe_single_grouped_(weight|bias) moe_grouped_gemm moe_use_legacy_grouped_gemm mla_down_proj_fusion
use_legacy_models transformer_impl retro_.* bert_.* biencoder_.* ict_.* dino_.* vision_.* swin_backbone_type
(encoder|decoder)_num_layers use_grouped_gemm_for_.* fp[48]_param(_gather)?
"""
"""Other names, shapes or dtypes: a tensor without a row, and one that does not come out, are refused."""

BY_ANOTHER = """
mup_.* dsa_.* add_position_embedding use_rotary_position_embeddings openai_gelu onnx_safe use_fused_weighted_squared_relu
moe_token_drop_policy moe_pad_expert_input_to_capacity relative_attention_.*
"""
"""Without effect unless an argument with a row is other than plain; the kinds of embedding and activation."""

WITHOUT_EFFECT = """
_is_global_batch_size_explicitly_specified account_for_.* accumulate_.* activation_offload_fraction adam_.* adlr_.* align_.* allow_.*
app_tag_.* apply_query_key_layer_scaling apply_rope_fusion apply_wd_to_qk_layernorm async_.* attention_backend attention_dropout
attention_softmax_in_fp32 auto_detect_ckpt_format barrier_.* batch_invariant_mode bf16 bias_.*_fusion block_data_path cache_mla_latents
calc(ulate)?_.* chat_template check_.* ckpt_.* class(es)?_fraction clip_grad clone_.* config_logger_dir consumed_.* cp_comm_type cpu_.*
create_.* cross_entropy_.* .*cuda_graph.* data_(?!parallel_size).* dataloader_.* ddp_.* decoder_(first|last)_pipeline_num_layers
decoder_seq_length decoupled_.* decrease_.* defer_.* delay_.* delta_.* deprecated_.* deterministic_mode disable_.* dist_ckpt_.* distrib_.*
distribute_.* distributed_.* dump_.* embedding_(init_method_std|path) empty_.* enable_.* encoder_(pipeline|tensor)_model_parallel_size
encoder_seq_length end_weight_decay eod_mask_loss ep_overlap_.* error_.* eval_.* evidence_.* exit_.* exp_avg.*
expert_(gtp|tensor_parallel_num)_.* fake_.* fault_.* fim_.* fine_grained_.* finetune first_last_layers_bf16 flash_.* flight_.* fp16.*
fp32_residual_connection fp[48](_(?!param).*)? freeze_.* fsdp_.* ft_.* full_validation fused_residual_rmsnorm global_batch_size gpu_.*
grad_.* gradient_.* grpo_.* gtp_.* head_lr_mult hidden_dropout hierarchical_.* high_priority_.* hysteresis img_[hw] indexer_.*
inference_.* init_.* initial_.* inprocess_.* iter_per_epoch iterations_to_skip keep_.* kitchen_.* use_kitchen_attention langrl_.* lazy_.*
legacy_tokenizer lion_.* load load_.* local_rank log_.* logging_.* logits_.* loss_.* lr lr_.* main_.*_dtype make_vocab_size_divisible_by
manual_gc.* mask_.* masked_softmax_fusion max_(seqlen|tokens)_.* megatron_fsdp_.* memory_.* merge_file metadata_path micro.* mid_level_.*
min_.* mlp_chunks_.* mmap_.* mock_.*
moe_(deepep|enable_deepep|enable_routing_replay|flex|hybridep|ncclep|paged_stash|permute_fusion|routing_trace|upcycling).*
moe_(input_jitter_eps|layer_recompute|pad_experts_for_cuda_graph_inference|per_layer_logging|router_bias_update_rate|router_dtype|router_fusion)
moe_(router_padding_for_.*|router_quantile_balancing_ema|shared_expert_overlap|token_dispatcher_type|use_upcycling|z_loss_coeff)
mtp_(detach_heads|loss_scaling_factor|standalone) multiple_.* muon_.* nccl_.* no_(load|save|persist|weight_decay)_.* non_persistent_.*
null_tokenizer_.* num_(channels|classes|dataset|distributed|layers_at|layers_per_virtual|speculative|virtual|workers).* nvtx_.* object_.*
offload_.* offset_.* one_logger_.* optimizer.* outer_.* output_bert_embeddings overlap_.* override_.* pad_vocab_size params_dtype
patch_dim per_.* perform_.* phase_.* pin_.* pipeline_.*_(backend|layout|rank) pretrained_checkpoint profile.* pytorch_.* qk_clip.*
query_in_block_prob rampup_.* recompute_.* record_.* refit_.* replication.* rerun_.* reset_.* result_.* retriever_.* reuse_.* rl_.* run_.*
s3_.* sample_rate save.* scatter_.* seed sequence_parallel sft.* sgd_.* sharp_.* short_.* skip.* special_tokens split start_.* step_.*
straggler_.* stream_.* strict_.* suggested_.* symmetric_.* te_.* tensor_parallel_num_.* tensorboard_.* test_.* tiktoken_.* timing_.*
titles_.* tokenizer_(?!type).* torch_fsdp2_.* tp_comm_.* train_.* transformer_pipeline_model_parallel_size trust_.*
use_(checkpoint|cpu|custom|dist|flash|gloo|layer_wise|legacy_static|mamba_mem|megatron_fsdp|mp_args|one_sent|persistent|precision|pytorch).*
use_(ring|sharp|te_activation|tokenizer|torch|tp_pp|transformer_engine).* valid_.* validation_.* variable_.* verify_.*
vocab_(extra_ids|file) wandb_.* weight_decay.* wgrad_.*
"""
"""Data, optimizer, schedule, precision, kernels, how ranks share work, what is logged; noise and losses of the training only."""

"""Columns of the CSV that the runtime stage writes."""

RUNTIME = (
    "study backbone implementation method context batch budget_percent k per_step_ms per_step_low_ms per_step_high_ms "
    "prefill_ms end_to_end_ms recording_ms peak_memory_mib step_bytes floor_ms bandwidth_gb_s state_bytes "
    "tokens_as_prototype attention_kernels not_measured repeats weights phi_weights dtype device model_id revision"
).split()

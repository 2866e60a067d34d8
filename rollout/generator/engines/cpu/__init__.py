"""What an engine on CPUs does otherwise; who has GPUs never meets it.

`vllm_thread`: vLLM's core in a thread of the generator. `unpacked`: weights that layers keep as they are loaded.
"""

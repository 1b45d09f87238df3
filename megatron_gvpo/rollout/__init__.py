"""SGLang: wire client, server pool, weight-update control calls, teacher, local servers. No megatron, no torch."""

"""Advantage estimators: from rewards to how much better each token did than expected.

Every registered estimator is called in one way, by `estimate_advantages`: with the keywords
`token_level_rewards`, `response_mask` and `config` (the AlgorithmConfig), and with those fields of
`AdvantageInputs` that the batch holds and that the estimator's signature takes. It returns
`(advantages, returns)`, both (B, R). The estimators here return zero outside the response mask.
"""

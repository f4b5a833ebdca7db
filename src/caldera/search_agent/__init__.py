"""The search agent: a loop in which the policy searches by tags; the retriever that it asks."""

"""Agent loops: answers of several turns, in which the policy calls tools or is talked to."""

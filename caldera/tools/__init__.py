"""What an agent can call: tools, the formats in which it calls them, and how calls are run."""

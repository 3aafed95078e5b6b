"""What clients see of a run: jobs, ranks, the timeline, previews, metrics, webhooks."""

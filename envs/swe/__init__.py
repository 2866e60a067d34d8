"""Software engineering: repositories in sandboxes, tasks, an agent that edits and runs commands."""

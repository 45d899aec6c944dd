"""Programs for those who work on structlin; they are in no wheel."""

"""What the subcommands of the command line do; `flashdecoding.cli` holds their options and help."""

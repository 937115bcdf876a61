"""The command `dmc`: the table of commands, and their settings; outside of `dmc`, whose import brings torch."""

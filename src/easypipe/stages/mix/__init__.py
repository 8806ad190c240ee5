"""The mix stage: several datasets become one."""

"""The mix stage makes one dataset from several, by weights and weight schedules."""

"""The mix stage makes one dataset of several, by weights and weight schedules."""

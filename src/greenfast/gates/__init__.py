"""Floor 4: the five gates, BUILD, RESOURCES, CORRECTNESS, PERFORMANCE and EVIDENCE, in this order."""

"""Redis between processes that share only a network: streams of numbered messages that outlive outages.

    connection   one connection of one thread: waits through outages, says when Redis was away for too long
    replies      what Redis answers, off the connection's socket
    entries      what lies in a stream: headers, checksums, parts
    streams      one writer, one reader: append, read, acknowledge, reclaim, release; large values in parts
    leases       names that one holder has at a time
    channels     a conversation of two over two such streams: what batches and the event log travel by
    run_names    a run's name: of two runs of one name, the second is refused
    sample_*     samples to the ranks of an outside trainer, and what these tell
    feed_place   what a run's folder tells an outside trainer
    server       a private server of a run's own (`transport.redis.start`)

Nothing is pickled. A stream's writer keeps what it has not released, and writes again what Redis lost.
"""

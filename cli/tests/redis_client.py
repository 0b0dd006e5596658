"""redis-py, unmodified, on one node: what an application uses it for. Prints `done`."""

import sys
import threading

import redis


def check(found, expected):
    assert found == expected, f"{found!r} instead of {expected!r}"


def basics(client):
    check(client.set("name", "ada"), True)
    check(client.get("name"), b"ada")
    check(client.set("name", "bob", nx=True), None)
    check(client.mset({"{x}1": 1, "y2": 2}), True)
    check(client.mget("{x}1", "y2", "none"), [b"1", b"2", None])
    check(client.incrbyfloat("f", 0.5), 0.5)
    check(client.hset("h", mapping={"a": 1, "b": 2}), 2)
    check(client.hgetall("h"), {b"a": b"1", b"b": b"2"})
    check(client.sadd("s", "m", "n"), 2)
    check(client.smembers("s"), {b"m", b"n"})
    check(client.zadd("z", {"low": 1, "high": 2.5}), 2)
    pairs = client.zrange("z", 0, -1, withscores=True)
    # Lists with RESP3, tuples with RESP2: the same with Redis itself.
    check([tuple(pair) for pair in pairs], [(b"low", 1.0), (b"high", 2.5)])
    check(client.rpush("l", 1, 2, 3), 3)
    check(client.lrange("l", 0, -1), [b"1", b"2", b"3"])
    check(client.setex("t", 100, "v"), True)
    assert 0 < client.ttl("t") <= 100
    try:
        client.hget("name", "x")
        raise AssertionError("a string is not a hash")
    except redis.ResponseError as error:
        assert "WRONGTYPE" in str(error)
    assert client.info()["role"] == "master"
    assert client.ping()


def transfers(client, port):
    """Many clients move money between keys of different slots, with WATCH and retries."""
    client.mset({"alice": 100, "bob": 100, "carol": 100})
    names = ["alice", "bob", "carol"]

    def move(number):
        own = redis.Redis(port=port)

        def transfer(pipe):
            source, target = names[number % 3], names[(number + 1) % 3]
            balance = int(pipe.get(source))
            pipe.multi()
            if balance >= 7:
                pipe.decrby(source, 7)
                pipe.incrby(target, 7)

        for _ in range(10):
            own.transaction(transfer, *names)
            number += 1

    threads = [threading.Thread(target=move, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(sum(int(value) for value in client.mget(names)), 300)


def locks(client):
    """SET NX PX, and a release that deletes the key only if the caller still owns it."""
    check(client.set("lock", "one", nx=True, px=60_000), True)
    check(client.set("lock", "two", nx=True, px=60_000), None)

    def release(pipe):
        owner = pipe.get("lock")
        pipe.multi()
        if owner == b"one":
            pipe.delete("lock")

    client.transaction(release, "lock")
    check(client.set("lock", "two", nx=True, px=60_000), True)


def queues(client, port):
    """Workers that wait for elements of a list, and a time-out."""
    check(client.blpop(["jobs"], timeout=0.05), None)
    taken, many = [], 40

    def work():
        own = redis.Redis(port=port)
        while (found := own.blpop(["urgent", "jobs"], timeout=0))[1] != b"stop":
            taken.append(found[1])

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for number in range(many):
        client.rpush("urgent" if number % 4 == 0 else "jobs", number)
    client.rpush("jobs", *["stop"] * len(workers))
    for worker in workers:
        worker.join()
    check(sorted(map(int, taken)), list(range(many)))
    check(client.exists("urgent", "jobs"), 0)
    client.zadd("due", {"late": 2.5, "soon": 1})
    check(client.bzpopmin(["none", "due"], timeout=0), (b"due", b"soon", 1.0))
    client.rpush("from", "one")
    check(client.blmove("from", "to", 0, "LEFT", "RIGHT"), b"one")
    check(client.brpoplpush("none", "to", timeout=0.05), None)


def scripts(client, port):
    """Locks of the library, which release and extend themselves with scripts; scripts by digest."""
    lock = client.lock("resource", timeout=60)
    check(lock.acquire(blocking=False), True)
    other = redis.Redis(port=port).lock("resource", timeout=60)
    check(other.acquire(blocking=False), False)
    check(lock.extend(10), True)
    check(lock.reacquire(), True)
    check(lock.owned(), True)
    lock.release()
    try:
        lock.release()
        raise AssertionError("the lock was released")
    except redis.exceptions.LockError:
        pass
    check(other.acquire(blocking=False), True)
    client.set("resource", "stolen")
    try:
        other.release()
        raise AssertionError("the lock was stolen")
    except redis.exceptions.LockNotOwnedError:
        pass
    client.script_flush()
    take = client.register_script("""
        local left = tonumber(redis.call('GET', KEYS[1]) or ARGV[1])
        if left < tonumber(ARGV[2]) then return {0, left} end
        redis.call('SET', KEYS[1], left - ARGV[2])
        redis.call('RPUSH', KEYS[2], cjson.encode({taken = tonumber(ARGV[2])}))
        return {1, left - ARGV[2]}
    """)
    check(take(keys=["stock", "log"], args=[10, 4]), [1, 6])
    check(client.script_exists(take.sha), [True])
    for is_transaction in (True, False):
        with client.pipeline(transaction=is_transaction) as pipe:
            take(keys=["stock", "log"], args=[10, 2], client=pipe)
            pipe.get("stock")
            take(keys=["stock", "log"], args=[10, 9], client=pipe)
            answers = pipe.execute()
        left = 4 if is_transaction else 2
        check(answers, [[1, left], str(left).encode(), [0, left]])
    check(client.llen("log"), 3)
    # The library sends the text again to a node that has forgotten it.
    client.script_flush()
    check(take(keys=["stock", "log"], args=[10, 1]), [1, 1])
    try:
        client.eval("return redis.call('GET', 'elsewhere')", 1, "stock")
        raise AssertionError("the key was not declared")
    except redis.ResponseError as error:
        assert "did not declare the key 'elsewhere'" in str(error), error

    # Many clients count under one lock.
    def count():
        own = redis.Redis(port=port)
        for _ in range(5):
            with own.lock("counting", timeout=60, sleep=0.01):
                own.set("counted", int(own.get("counted") or 0) + 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(client.get("counted"), b"20")


def listings(client, port, protocol):
    """Keys and elements by iterators of the library; cursors on several connections."""
    own = redis.Redis(port=port, db=5, protocol=protocol)
    own.flushdb()
    check(own.keys(), [])
    check(own.randomkey(), None)
    names = [b"list:%03d" % number for number in range(25)]
    own.mset({name: 1 for name in names})
    own.sadd("set", "a", "b", "c")
    own.zadd("zset", {"low": 1, "high": 2.5})
    own.hset("hash", mapping={"a": 1, "ab": 2, "b": 3})
    others = [b"hash", b"set", b"zset"]
    check(own.dbsize(), 28)
    check(sorted(own.keys()), sorted(names + others))
    check(own.keys("list:00?"), names[:10])
    check(list(own.scan_iter()), sorted(names + others))
    check(list(own.scan_iter(match="list:*", count=4)), names)
    check(list(own.scan_iter(match="*[0-1]", count=1_000)), [n for n in names if n[-1] in b"01"])
    check(list(own.scan_iter(_type="ZSET")), [b"zset"])
    assert own.randomkey() in names + others
    # Another connection goes on with the cursor, and again.
    cursor, first = own.scan(0, count=20)
    other = redis.Redis(port=port, db=5)
    for _ in range(2):
        end, rest = other.scan(cursor, count=1_000)
        check((end, first + rest), (0, sorted(names + others)))
    try:
        client.scan(cursor)
        raise AssertionError("the cursor is of another database")
    except redis.ResponseError as error:
        assert "begin again with cursor 0" in str(error), error
    check(dict(own.hscan_iter("hash", match="a*")), {b"a": b"1", b"ab": b"2"})
    check(set(own.sscan_iter("set")), {b"a", b"b", b"c"})
    check(dict(own.zscan_iter("zset")), {b"low": 1.0, b"high": 2.5})
    try:
        own.pipeline(transaction=True).get("x").dbsize().execute()
        raise AssertionError("DBSIZE in a transaction")
    except redis.ResponseError as error:
        assert "DBSIZE is not allowed in transactions" in str(error), error
    client.set("kept", 1)
    check(own.flushdb(), True)
    check((own.dbsize(), client.exists("kept")), (0, 1))
    own.set("x", 1)
    check(own.flushall(asynchronous=True), True)
    check((own.keys(), client.dbsize()), ([], 0))


def heard(subscription):
    """The next message."""
    message = subscription.get_message(timeout=60)
    assert message, "a message arrives"
    return message["type"], message["pattern"], message["channel"], message["data"]


def messages(client, port, protocol):
    """Subscriptions of the library; messages of a pipeline and of a transaction that is discarded."""
    own = redis.Redis(port=port, protocol=protocol)
    with own.pubsub() as subscription:
        subscription.subscribe("news")
        check(heard(subscription), ("subscribe", None, b"news", 1))
        subscription.psubscribe("n*")
        check(heard(subscription), ("psubscribe", None, b"n*", 2))
        check(client.pubsub_numsub("news"), [(b"news", 1)])
        check(client.publish("other", "unheard"), 0)
        with client.pipeline(transaction=True) as pipe:
            pipe.watch("counter")
            pipe.multi()
            pipe.incr("counter").publish("news", "never")
            client.incr("counter")
            try:
                pipe.execute()
                raise AssertionError("the watched key has changed")
            except redis.WatchError:
                pass
        with client.pipeline(transaction=True) as pipe:
            pipe.publish("news", "one").set("seen", protocol).publish("nothing", "two")
            check(pipe.execute(), [2, True, 1])
        check(heard(subscription), ("message", None, b"news", b"one"))
        check(heard(subscription), ("pmessage", b"n*", b"news", b"one"))
        check(heard(subscription), ("pmessage", b"n*", b"nothing", b"two"))
        check(client.get("seen"), str(protocol).encode())
        subscription.unsubscribe()
        check(heard(subscription), ("unsubscribe", None, b"news", 1))
        subscription.punsubscribe()
        check(heard(subscription), ("punsubscribe", None, b"n*", 0))
    client.delete("counter", "seen")


def main():
    port = int(sys.argv[1])
    for protocol in (2, 3):
        client = redis.Redis(port=port, protocol=protocol)
        basics(client)
        client.delete("name", "f", "h", "s", "z", "l", "t")
        listings(client, port, protocol)
        messages(client, port, protocol)
        with client.pipeline(transaction=True) as pipe:
            check(pipe.set("p", 1).incr("p").get("p").execute(), [True, 2, b"2"])
        with client.pipeline(transaction=False) as pipe:
            check(pipe.set("p", 1).incr("p").get("p").execute(), [True, 2, b"2"])
    client = redis.Redis(port=port)
    transfers(client, port)
    locks(client)
    queues(client, port)
    scripts(client, port)
    print("done")


main()

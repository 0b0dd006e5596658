//! Clients of Redis on a cluster of real processes: every command on every protocol beside Redis
//! itself, transactions while a node dies, and clients that do not know Orthodrome.

#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::wildcard_enum_match_arm,
    missing_docs,
    reason = "tests of real processes; an unmet expectation is a failed test"
)]

mod processes;
#[path = "middleware/tools.rs"]
mod tools;

use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use orthodrome_core::Rng;
use orthodrome_core::procedure::redis::COMMANDS;
use processes::{Cluster, free_redis_prefix, json, must_end_within, run, text, until};
use tools::{is_here, skipped};

const LIMIT: Duration = Duration::from_secs(600);

/// Three nodes in three regions that listen for Redis at `ports`.
struct Rig {
    cluster: Cluster,
    ports: Vec<u16>,
}

fn rig(protocol: &str, more: &[&str]) -> Rig {
    let prefix = free_redis_prefix();
    let own = format!("listen = \"127.0.0.1:{prefix}");
    let arguments = ["--topology", "local3", "--protocol", protocol, "--redis"];
    let changes = [("listen = \"127.0.0.1:63", own.as_str())];
    let mut cluster = Cluster::init(3, &[&arguments[..], more].concat(), &changes);
    cluster.start(1..=3);
    Rig { cluster, ports: (79..82).map(|last| prefix * 100 + last).collect() }
}

/// An answer.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Reply {
    Status(String),
    Error(String),
    Integer(i64),
    Bulk(String),
    Nil,
    Array(Vec<Reply>),
}

/// A small client of RESP2.
struct Client(BufReader<TcpStream>);

impl Client {
    fn connect(port: u16) -> std::io::Result<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        stream.set_nodelay(true)?;
        Ok(Self(BufReader::new(stream)))
    }

    fn send(&mut self, commands: &[&[&str]]) -> std::io::Result<()> {
        let mut out = String::new();
        for words in commands {
            write!(out, "*{}\r\n", words.len()).unwrap();
            for word in *words {
                write!(out, "${}\r\n{word}\r\n", word.len()).unwrap();
            }
        }
        self.0.get_mut().write_all(out.as_bytes())
    }

    fn receive(&mut self) -> std::io::Result<Reply> {
        let mut line = String::new();
        if self.0.read_line(&mut line)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        let (kind, rest) = line.trim_end().split_at(1);
        Ok(match kind {
            "+" => Reply::Status(rest.into()),
            "-" => Reply::Error(rest.into()),
            ":" => Reply::Integer(rest.parse().unwrap()),
            "$" | "*" if rest == "-1" => Reply::Nil,
            "$" => {
                let mut bytes = vec![0; rest.parse::<usize>().unwrap() + 2];
                self.0.read_exact(&mut bytes)?;
                bytes.truncate(bytes.len() - 2);
                Reply::Bulk(String::from_utf8_lossy(&bytes).into_owned())
            }
            "*" => {
                let many: usize = rest.parse().unwrap();
                Reply::Array((0..many).map(|_| self.receive()).collect::<Result<_, _>>()?)
            }
            other => panic!("{other}: {line}"),
        })
    }

    /// Sends commands together, and returns the answers.
    fn pipeline(&mut self, commands: &[&[&str]]) -> std::io::Result<Vec<Reply>> {
        self.send(commands)?;
        commands.iter().map(|_| self.receive()).collect()
    }

    fn run(&mut self, line: &str) -> Reply {
        let words: Vec<&str> = line.split(' ').collect();
        self.pipeline(&[&words]).unwrap().remove(0)
    }
}

/// Redis itself; killed when dropped.
struct Redis(Child, u16);

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn redis() -> Option<Redis> {
    if !is_here("redis-server", "--version") {
        return None;
    }
    let port = free_redis_prefix() * 100 + 79;
    let mut command = Command::new("redis-server");
    command.args(["--port", &port.to_string(), "--save", "", "--appendonly", "no"]);
    let process = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let redis = Redis(process, port);
    until("redis-server listens", || Client::connect(port).is_ok());
    Some(redis)
}

/// The part of an answer that both servers must agree on. The order of sets and hashes differs, and
/// so do explanations of errors.
fn comparable(command: &str, reply: Reply) -> Reply {
    match reply {
        // Redis looks at the types of these keys first, and then at the options.
        Reply::Error(_) if merges(command) => Reply::Error(String::new()),
        Reply::Error(why) => Reply::Error(why.split(' ').next().unwrap_or_default().to_owned()),
        Reply::Array(mut items) => {
            let unordered = ["smembers", "sinter", "sunion", "sdiff", "hkeys", "hvals", "spop"];
            if unordered.contains(&command) {
                items.sort_by_key(|item| format!("{item:?}"));
            }
            if command == "hgetall" {
                let mut pairs: Vec<String> =
                    items.chunks(2).map(|pair| format!("{pair:?}")).collect();
                pairs.sort();
                return Reply::Array(pairs.into_iter().map(Reply::Bulk).collect());
            }
            Reply::Array(items)
        }
        other => other,
    }
}

/// True for `ZUNION` and its relatives.
fn merges(command: &str) -> bool {
    ["zunion", "zinter", "zdiff"].iter().any(|name| command.starts_with(name))
}

/// The position of the number of keys in a command that has one.
fn number_of_keys(command: &str) -> Option<i64> {
    let is_stored = command.ends_with("store");
    let has_one = merges(command) || command.ends_with("mpop") || command == "sintercard";
    has_one.then_some(if is_stored { 2 } else { 1 })
}

/// A random command on few keys.
fn random_command(rng: &mut Rng) -> Vec<String> {
    let spec = loop {
        let spec = rng.pick(COMMANDS).unwrap();
        // Which members it takes is random in Redis. Lifetimes depend on the moment. Redis does not
        // say what a range of names is if scores differ, and its encodings depend on the past.
        let excluded = [
            "spop",
            "srandmember",
            "hrandfield",
            "zrandmember",
            "zlexcount",
            "zrangebylex",
            "zrevrangebylex",
            "zremrangebylex",
            "object",
            "ttl",
            "pttl",
            "expiretime",
            "pexpiretime",
            "expire",
            "pexpire",
            "setex",
            "psetex",
        ];
        if !excluded.contains(&spec.name) {
            break spec;
        }
    };
    let least = usize::try_from(spec.arity.abs()).unwrap() - 1;
    let more = if spec.arity < 0 { usize::try_from(rng.below(4)).unwrap() } else { 0 };
    let mut words = vec![spec.name.to_owned()];
    for at in 1..=i64::try_from(least + more).unwrap() {
        let (first, last, step) = spec.keys;
        let is_key = at >= first && (last < 0 || at <= last) && (at - first) % step == 0;
        let keys = ["k1", "k2", "{k}3"];
        let others = [
            "0",
            "1",
            "-1",
            "2",
            "x",
            "y",
            "3.5",
            "NX",
            "XX",
            "GET",
            "LEFT",
            "RIGHT",
            "(1",
            "+inf",
            "WITHSCORES",
            "BYSCORE",
            "REV",
            "INCR",
            "CH",
            "KEEPTTL",
            "100000",
            "COUNT",
            "RANK",
            "LIMIT",
            "MIN",
            "MAX",
            "BEFORE",
            "REPLACE",
            "AGGREGATE",
            "BIT",
        ];
        let number = number_of_keys(spec.name);
        let is_key = is_key || number.is_some_and(|number| at == number + 1);
        let word = if is_key {
            rng.pick(&keys)
        } else if number == Some(at) && rng.chance(2, 3) {
            Some(&"1")
        } else {
            rng.pick(&others)
        };
        words.push((*word.unwrap()).to_owned());
    }
    words
}

#[test]
fn commands_answer_as_in_redis() {
    must_end_within(LIMIT);
    let Some(redis) = redis() else { return skipped("redis-server is not installed") };
    let rig = rig("carousel-basic", &[]);
    let mut ours = Client::connect(rig.ports[0]).unwrap();
    let mut theirs = Client::connect(redis.1).unwrap();
    let mut rng = Rng::stream(1, "commands beside Redis", 0);
    for round in 0..150 {
        let in_transaction = rng.chance(1, 3);
        let mut commands: Vec<Vec<String>> = (0..12).map(|_| random_command(&mut rng)).collect();
        if in_transaction {
            commands.insert(0, vec!["multi".into()]);
            commands.push(vec!["exec".into()]);
        }
        let words: Vec<Vec<&str>> =
            commands.iter().map(|words| words.iter().map(String::as_str).collect()).collect();
        let words: Vec<&[&str]> = words.iter().map(Vec::as_slice).collect();
        let own = ours.pipeline(&words).unwrap();
        let redis = theirs.pipeline(&words).unwrap();
        let names: Vec<&str> = words.iter().map(|words| words[0]).collect();
        let named = |at: usize, reply: Reply| match (names[at], reply) {
            ("exec", Reply::Array(items)) => {
                let inner = items.into_iter().zip(&names[1..]);
                Reply::Array(inner.map(|(item, name)| comparable(name, item)).collect())
            }
            (name, reply) => comparable(name, reply),
        };
        for (at, (own, redis)) in own.into_iter().zip(redis).enumerate() {
            let (own, redis) = (named(at, own), named(at, redis));
            assert_eq!(own, redis, "round {round}, {:?} of {words:?}", words[at]);
        }
    }
}

#[test]
fn every_protocol_runs_commands_and_transactions() {
    must_end_within(LIMIT);
    for row in orthodrome_protocols::registry::rows() {
        let rig = rig(row.name, &[]);
        let mut clients: Vec<Client> =
            rig.ports.iter().map(|port| Client::connect(*port).unwrap()).collect();
        let name = row.name;
        let ok = || Reply::Status("OK".into());
        let bulk = |text: &str| Reply::Bulk(text.into());
        assert_eq!(clients[0].run("MSET a 1 b 2"), ok(), "{name}");
        assert_eq!(clients[1].run("INCR a"), Reply::Integer(2), "{name}");
        assert_eq!(clients[2].run("MGET a b c"), {
            Reply::Array(vec![bulk("2"), bulk("2"), Reply::Nil])
        });
        assert_eq!(clients[1].run("SET lock me NX PX 60000"), ok(), "{name}");
        assert_eq!(clients[2].run("SET lock other NX PX 60000"), Reply::Nil, "{name}");
        let release = |owner: &'static str| ["EVAL", RELEASE, "1", "lock", owner];
        let released = clients[2].pipeline(&[&release("other"), &release("me")]).unwrap();
        assert_eq!(released, [Reply::Integer(0), Reply::Integer(1)], "{name}: a script");
        let exec: [&[&str]; 4] =
            [&["MULTI"], &["EVAL", TRANSFER, "2", "a", "b", "5"], &["GET", "a"], &["EXEC"]];
        let answer = clients[1].pipeline(&exec).unwrap().remove(3);
        let Reply::Array(answers) = answer else { panic!("{name}: {answer:?}") };
        assert!(matches!(&answers[0], Reply::Error(why) if why.starts_with("POOR ")), "{name}");
        assert_eq!(answers[1], bulk("2"), "{name}: a script that fails changes nothing");
        assert_eq!(clients[0].run("EXISTS lock"), Reply::Integer(0), "{name}");
        assert_eq!(clients[0].run("WATCH a"), ok(), "{name}");
        assert_eq!(clients[1].run("SET a 2"), ok(), "{name}");
        let exec: [&[&str]; 3] = [&["MULTI"], &["INCR", "b"], &["EXEC"]];
        assert_eq!(clients[0].pipeline(&exec).unwrap()[2], Reply::Nil, "{name}: watched");
        let exec: [&[&str]; 4] = [&["MULTI"], &["INCR", "b"], &["RPUSH", "l", "x"], &["EXEC"]];
        let both = Reply::Array(vec![Reply::Integer(3), Reply::Integer(1)]);
        assert_eq!(clients[0].pipeline(&exec).unwrap()[3], both, "{name}");
        assert_eq!(clients[2].run("GET b"), bulk("3"), "{name}");
        assert_eq!(clients[1].run("SET short 1 PX 1"), ok(), "{name}");
        until("the key expires", || clients[2].run("GET short") == Reply::Nil);
        assert_eq!(clients[0].run("EXISTS short"), Reply::Integer(0), "{name}");
        let listed = clients[0].run("KEYS *");
        if let Reply::Error(why) = &listed {
            assert!(why.ends_with("not available with this cluster's protocol"), "{name}: {why}");
            continue;
        }
        assert_eq!(listed, Reply::Array(vec![bulk("a"), bulk("b"), bulk("l")]), "{name}");
        assert_eq!(clients[1].run("SCAN 0 MATCH l*"), {
            Reply::Array(vec![bulk("0"), Reply::Array(vec![bulk("l")])])
        });
        assert_eq!(clients[1].run("FLUSHDB"), ok(), "{name}");
        assert_eq!(clients[2].run("DBSIZE"), Reply::Integer(0), "{name}");
        // A message of a transaction at another node.
        let subscribed = clients[0].run("SUBSCRIBE news");
        assert_eq!(subscribed, {
            Reply::Array(vec![bulk("subscribe"), bulk("news"), Reply::Integer(1)])
        });
        let exec: [&[&str]; 4] =
            [&["MULTI"], &["SET", "k", "1"], &["PUBLISH", "news", "x"], &["EXEC"]];
        let both = Reply::Array(vec![ok(), Reply::Integer(0)]);
        assert_eq!(clients[1].pipeline(&exec).unwrap()[3], both, "{name}");
        let message = Reply::Array(vec![bulk("message"), bulk("news"), bulk("x")]);
        assert_eq!(clients[0].receive().unwrap(), message, "{name}");
        assert_eq!(clients[0].run("UNSUBSCRIBE"), {
            Reply::Array(vec![bulk("unsubscribe"), bulk("news"), Reply::Integer(0)])
        });
        assert_eq!(clients[0].run("GET k"), bulk("1"), "{name}");
    }
}

/// Deletes a lock if its owner asks.
const RELEASE: &str = "if redis.call('get', KEYS[1]) == ARGV[1] then \
    return redis.call('del', KEYS[1]) else return 0 end";
/// Moves an amount, unless that would be more than there is.
const TRANSFER: &str = "redis.call('incrby', KEYS[2], ARGV[1]) \
    if redis.call('decrby', KEYS[1], ARGV[1]) < 0 then return redis.error_reply('POOR account') end \
    return redis.call('mget', KEYS[1], KEYS[2])";

/// Scripts whose answers are compared with those of Redis, errors included. They run one after the
/// other, on the keys `n`, `l`, `h`, `z` and `s`, with the arguments `5`, `x` and `0.5`.
const SCRIPTS: &[&str] = &[
    "return 1",
    "return {1, 2.9, 'x', true, false, {3, {4}}, nil, 5}",
    "return {KEYS, ARGV, #KEYS, #ARGV}",
    "return redis.call('set', KEYS[1], ARGV[1])",
    "return redis.call('get', KEYS[1])",
    "return redis.call('incrby', KEYS[1], ARGV[1])",
    "return redis.call('incrbyfloat', KEYS[1], ARGV[3])",
    "return redis.call('rpush', KEYS[2], unpack(ARGV))",
    "return redis.call('lrange', KEYS[2], 0, -1)",
    "return redis.call('get', KEYS[2])",
    "return redis.pcall('get', KEYS[2])",
    "local r = redis.pcall('get', KEYS[2]) return {type(r), r.err}",
    "local ok, e = pcall(redis.call, 'get', KEYS[2]) return {tostring(ok), e}",
    "redis.call('hset', KEYS[3], 'a', 1, 'b', 2.5) return redis.call('hgetall', KEYS[3])",
    "local r = {} local h = redis.call('hgetall', KEYS[3]) for i = 1, #h, 2 do r[#r + 1] = h[i] .. '=' \
     .. h[i + 1] end table.sort(r) return table.concat(r, ',')",
    "return redis.call('zadd', KEYS[4], 1, 'one', 2.5, 'two')",
    "return redis.call('zrange', KEYS[4], 0, -1, 'withscores')",
    "return redis.call('zscore', KEYS[4], 'two')",
    "return {redis.call('zscore', KEYS[4], 'none'), redis.call('get', KEYS[5])}",
    "return redis.call('sadd', KEYS[5], 1, 2, 3)",
    "return redis.call('type', KEYS[5]).ok",
    "return redis.call('type', KEYS[5])",
    "return redis.call('mget', KEYS[1], KEYS[3])",
    "return redis.call('set', KEYS[1], 0.1)",
    "return redis.call('get', KEYS[1])",
    "return redis.call('set', KEYS[1], 12345678901234567890)",
    "return redis.call('get', KEYS[1])",
    "return redis.call('set', KEYS[1], 7, 'NX')",
    "return redis.call('set', KEYS[1], 7, 'GET')",
    "return redis.call('del', KEYS[1], KEYS[2])",
    "return redis.call('exists', KEYS[1], KEYS[2], KEYS[3])",
    "return redis.call('ping')",
    "return redis.call('echo', 'x')",
    "return redis.call('nope')",
    "return redis.call('get')",
    "return redis.call('get', {})",
    "return redis.call()",
    "return redis.call('multi')",
    "return redis.call('eval', 'return 1', 0)",
    "return redis.error_reply('My error')",
    "return redis.error_reply('word')",
    "return redis.status_reply('fine')",
    "return {ok = 'fine'}",
    "return {err = 'MY error'}",
    "return {double = 3.25}",
    "return redis.sha1hex('x')",
    "error('failed')",
    "error({err = 'MY own'})",
    "x = 1",
    "return x",
    "redis.x = 1",
    "return nil + 1",
    "local t return t.x",
    "return #5",
    "return {} < {}",
    "not lua",
    "return cjson.encode({1, 2, {a = 1.5}, 'x/y', true})",
    "return cjson.decode('{\"a\": [1, null, {\"b\": \"c\"}]}').a[3].b",
    "return cjson.decode('[1, 2')",
    "return cjson.encode({[1] = 1, [100] = 2})",
    "return cmsgpack.unpack(cmsgpack.pack({1, 'x', {2}}))",
    "return {bit.band(12, 10), bit.lshift(1, 4), bit.tohex(255)}",
    "return string.format('%5.1f|%d|%s|%q|%x', 3.14159, 42, 'a', 'b\"c', 255)",
    "return {string.find('hello world', 'o w'), (string.gsub('hello', 'l', 'L'))}",
    "local t = {5, 2, 8, 1} table.sort(t, function(a, b) return a > b end) return t",
    "return tostring(1 / 3) .. tostring(1e15) .. tostring(100)",
    "return {tonumber('0x10'), tonumber('10', 2), tostring(tonumber('x'))}",
    "return string.rep('x', -1)",
    "return select('#', unpack({1, 2, 3}))",
    "local function f() return f() + 1 end return f()",
    "#!lua flags=no-writes\nreturn redis.call('get', KEYS[1])",
    "#!lua flags=no-writes\nreturn redis.call('set', KEYS[1], 1)",
    "#!lua flags=nonsense\nreturn 1",
    "#!other\nreturn 1",
    "return redis.replicate_commands()",
    "return redis.REDIS_VERSION_NUM > 0 and type(redis.REDIS_VERSION)",
    "return math.random() == math.random()",
    "return redis.log(redis.LOG_DEBUG, 'x')",
];

#[test]
fn scripts_answer_as_in_redis() {
    must_end_within(LIMIT);
    let Some(redis) = redis() else { return skipped("redis-server is not installed") };
    let rig = rig("carousel-basic", &[]);
    let mut ours = Client::connect(rig.ports[0]).unwrap();
    let mut theirs = Client::connect(redis.1).unwrap();
    let mut digests = Vec::new();
    for script in SCRIPTS {
        let load: &[&str] = &["SCRIPT", "LOAD", script];
        let digest = ours.pipeline(&[load]).unwrap().remove(0);
        assert_eq!(digest, theirs.pipeline(&[load]).unwrap().remove(0), "{script}");
        if let Reply::Bulk(digest) = digest {
            digests.push(digest);
        }
        let words: [&str; 11] = ["EVAL", script, "5", "n", "l", "h", "z", "s", "5", "x", "0.5"];
        let own = ours.pipeline(&[&words]).unwrap();
        assert_eq!(own, theirs.pipeline(&[&words]).unwrap(), "{script}");
    }
    assert!(digests.len() > SCRIPTS.len() - 5);
    // By their digests, all at once, in and outside of MULTI; the keys are as the scripts left them.
    let by_digest: Vec<[&str; 11]> = digests
        .iter()
        .map(|digest| ["EVALSHA", digest, "5", "n", "l", "h", "z", "s", "5", "x", "0.5"])
        .collect();
    let mut words: Vec<&[&str]> = by_digest.iter().map(<[&str; 11]>::as_slice).collect();
    assert_eq!(ours.pipeline(&words).unwrap(), theirs.pipeline(&words).unwrap());
    words.insert(0, &["MULTI"]);
    words.push(&["EXEC"]);
    assert_eq!(ours.pipeline(&words).unwrap(), theirs.pipeline(&words).unwrap());
    let unknown: [&[&str]; 3] = [
        &["EVALSHA", "0000000000000000000000000000000000000000", "0"],
        &["EVAL", "return 1", "3", "a"],
        &["EVAL_RO", "return redis.call('set', KEYS[1], 1)", "1", "n"],
    ];
    assert_eq!(ours.pipeline(&unknown).unwrap(), theirs.pipeline(&unknown).unwrap());
}

/// A random expression of Lua.
fn random_expression(rng: &mut Rng, depth: u32) -> String {
    let inner = |rng: &mut Rng| random_expression(rng, depth + 1);
    let pick = |rng: &mut Rng, from: &[&str]| (*rng.pick(from).unwrap()).to_owned();
    match if depth > 3 { 0 } else { rng.below(12) } {
        0 | 1 => pick(
            rng,
            &[
                "0",
                "1",
                "2",
                "-3",
                "0.5",
                "1e15",
                "'a'",
                "'10'",
                "' 5 '",
                "''",
                "nil",
                "true",
                "false",
                "x",
                "y",
                "s",
                "t",
                "f",
                "t.a",
                "t[1]",
                "#t",
                "#s",
                "t.b.c",
                "...",
                "(...)",
                "select('#', ...)",
                "0x10",
                "1e300",
                "f(2)",
            ],
        ),
        2..=5 => {
            let operators =
                ["+", "-", "*", "/", "%", "^", "..", "==", "~=", "<", ">", "<=", ">=", "and", "or"];
            let (left, operator, right) = (inner(rng), pick(rng, &operators), inner(rng));
            let text = format!("{left} {operator} {right}");
            if rng.chance(1, 2) { format!("({text})") } else { text }
        }
        6 => pick(rng, &["not ", "- ", "#"]) + &inner(rng),
        7 => format!("{{{}, {}}}", inner(rng), inner(rng)),
        8 => {
            let name = pick(rng, &["f", "tostring", "tonumber", "type", "math.floor", "#"]);
            format!("{}({})", if name == "#" { "f" } else { &name }, inner(rng))
        }
        9 => format!("(function(a, ...) return {}, a, ... end)({})", inner(rng), inner(rng)),
        10 => {
            let name = pick(rng, &["sub", "find", "match", "gsub", "byte", "upper", "format"]);
            let texts = ["s", "'hello world'", "'a,b,c'", "'%d %s %5.2f'", "'key=val'", "x"];
            let more = [
                "'%a+'",
                "'(%w)(%w)'",
                "'l*'",
                "'.-o'",
                "'%s'",
                "'[a-c,]+'",
                "'^h'",
                "'o$'",
                "2",
                "-3",
                "'%1'",
                "'x%0y'",
                "'()'",
                "'%f[%w]%w+'",
                "'%b=v'",
                "x",
                "f",
            ];
            let (text, first, second) = (pick(rng, &texts), pick(rng, &more), pick(rng, &more));
            format!("string.{name}({text}, {first}, {second})")
        }
        _ => format!("select({}, {}, {})", pick(rng, &["1", "2", "-1"]), inner(rng), inner(rng)),
    }
}

/// A random statement of Lua.
fn random_statement(rng: &mut Rng, depth: u32) -> String {
    let exp = |rng: &mut Rng| random_expression(rng, 2);
    let block = |rng: &mut Rng| {
        let many = 1 + rng.below(2);
        (0..many).map(|_| random_statement(rng, depth + 1) + " ").collect::<String>()
    };
    match if depth > 2 { rng.below(6) } else { rng.below(16) } {
        0 => format!("x = {}", exp(rng)),
        1 => format!("x, y = {}, {}", exp(rng), exp(rng)),
        2 => format!("t.a = {} t[#t + 1] = {}", exp(rng), exp(rng)),
        3 => format!("x, t[1] = {}, {}", exp(rng), exp(rng)),
        4 => format!("local x, z = {}", exp(rng)),
        5 => format!("p({}, {})", exp(rng), exp(rng)),
        6 | 7 => format!("if {} then {}else {}end", exp(rng), block(rng), block(rng)),
        8 => format!("for i = 1, 3 do x = i {} if {} then break end end", block(rng), exp(rng)),
        9 => format!(
            "for k, v in pairs({{{}, {}}}) do p(k, v) {}end",
            exp(rng),
            exp(rng),
            block(rng)
        ),
        10 => format!("local n = 0 while n < 3 do n = n + 1 {}end", block(rng)),
        11 => {
            format!(
                "local n = 0 repeat local m = n n = n + 1 {}until n > 2 or {}",
                block(rng),
                exp(rng)
            )
        }
        12 => format!(
            "do local x = {} fs[#fs + 1] = function(...) x = {} return x, ... end end",
            exp(rng),
            exp(rng)
        ),
        13 => format!("for _, g in ipairs(fs) do p(g({})) end", exp(rng)),
        14 => {
            format!("p(pcall(function(...) {} return {} end, {}))", block(rng), exp(rng), exp(rng))
        }
        _ => format!(
            "t = setmetatable({{{}}}, {{__index = function(_, k) return {} end, __add = function(a, b) \
             return {} end, __call = function(_, a) return {} end, __eq = function() return true end, \
             __lt = function() return true end, __concat = function() return 'c' end}})",
            exp(rng),
            exp(rng),
            exp(rng),
            exp(rng)
        ),
    }
}

/// Random programs do in the interpreter what they do in Redis. Of errors, only that they happen is
/// compared: Redis names more operands.
#[test]
fn random_scripts_answer_as_in_redis() {
    must_end_within(LIMIT);
    let Some(redis) = redis() else { return skipped("redis-server is not installed") };
    let rig = rig("carousel-basic", &[]);
    let mut ours = Client::connect(rig.ports[0]).unwrap();
    let mut theirs = Client::connect(redis.1).unwrap();
    let mut succeeded = 0;
    for seed in 0..600 {
        let mut rng = Rng::stream(seed, "scripts beside Redis", 0);
        let statement = |rng: &mut Rng| {
            let statement = random_statement(rng, 0);
            format!(
                "ok = pcall(function(...) {statement} end, 4, nil, 'v') out[#out + 1] = tostring(ok)\n"
            )
        };
        let statements: String = (0..2 + rng.below(6)).map(|_| statement(&mut rng)).collect();
        let script = format!(
            "local out = {{}}
             local function show(v)
                 local kind = type(v)
                 if kind == 'table' or kind == 'function' then return kind end
                 if v ~= v then return 'nan' end
                 return tostring(v)
             end
             local function p(...)
                 local shown = {{}}
                 if (...) == false and select('#', ...) == 2 then shown = {{'error?'}} else
                     for i = 1, select('#', ...) do shown[i] = show((select(i, ...))) end
                 end
                 out[#out + 1] = table.concat(shown, ' ')
                 if #out > 100 then error('enough') end
             end
             local x, y, s, t, fs = 1, 'yy', 'some text', {{a = 5, 10, 20}}, {{}}
             local function f(a) return a, x end
             local ok
             {statements}
             return out"
        );
        let words = ["EVAL", &script, "0"];
        let own = ours.pipeline(&[&words]).unwrap().remove(0);
        let redis = theirs.pipeline(&[&words]).unwrap().remove(0);
        // Addresses, which only Redis shows.
        let without = |reply: Reply| {
            format!("{reply:?}")
                .split("0x")
                .map(|part| {
                    part.trim_start_matches(|digit: char| digit.is_ascii_hexdigit()).to_owned()
                })
                .collect::<Vec<_>>()
                .join("@")
        };
        if let Reply::Array(lines) = &own {
            let is_true = |line: &&Reply| **line == Reply::Bulk("true".into());
            succeeded += lines.iter().filter(is_true).count();
        }
        assert_eq!(without(own), without(redis), "seed {seed}:\n{script}");
    }
    assert!(succeeded > 600, "{succeeded} statements succeeded");
}

/// What a thread of [`history`] writes down about one transaction.
struct Attempt {
    ops: String,
    /// None: nothing was acknowledged, and nothing was refused.
    is_ok: Option<bool>,
    invoke_us: u128,
    complete_us: u128,
}

fn list(reply: &Reply) -> String {
    let Reply::Array(items) = reply else { panic!("{reply:?}") };
    let element = |item: &Reply| match item {
        Reply::Bulk(text) => text.clone(),
        other => panic!("{other:?}"),
    };
    items.iter().map(element).collect::<Vec<_>>().join(",")
}

/// One transaction over two lists: it reads both and appends to both. Half of them read before
/// `MULTI`, under `WATCH`.
fn append(
    client: &mut Client,
    rng: &mut Rng,
    start: Instant,
    element: u64,
) -> (Attempt, std::io::Result<()>) {
    let mut keys: Vec<String> = (0..2).map(|_| format!("list{}", rng.below(4))).collect();
    keys.dedup();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let watches = rng.chance(1, 2);
    let element = element.to_string();
    let appended: Vec<String> =
        keys.iter().map(|key| format!("[\"append\",\"{key}\",{element}]")).collect();
    let invoke_us = start.elapsed().as_micros();
    let mut attempt =
        Attempt { ops: appended.join(","), is_ok: Some(false), invoke_us, complete_us: 0 };
    let reads = |lists: &[Reply]| {
        let read =
            |(key, list_of): (&&str, &Reply)| format!("[\"r\",\"{key}\",[{}]]", list(list_of));
        keys.iter().zip(lists).map(read).collect::<Vec<_>>()
    };
    let done = (|| -> std::io::Result<()> {
        let mut seen = Vec::new();
        if watches {
            let watched = client.pipeline(&[&[&["WATCH"][..], keys.as_slice()].concat()])?;
            for key in &keys {
                let words: [&str; 4] = ["LRANGE", *key, "0", "-1"];
                seen.push(client.pipeline(&[&words])?.remove(0));
            }
            let is_seen = seen.iter().all(|list| matches!(list, Reply::Array(_)));
            if watched != [Reply::Status("OK".into())] || !is_seen {
                // The node could not read. The client gives up before anything was written.
                client.pipeline(&[&["UNWATCH"]])?;
                return Ok(());
            }
        }
        let mut commands: Vec<Vec<&str>> = vec![vec!["MULTI"]];
        if !watches {
            commands.extend(keys.iter().map(|key| vec!["LRANGE", *key, "0", "-1"]));
        }
        commands.extend(keys.iter().map(|key| vec!["RPUSH", *key, element.as_str()]));
        commands.push(vec!["EXEC"]);
        let commands: Vec<&[&str]> = commands.iter().map(Vec::as_slice).collect();
        // From here on it may take effect.
        attempt.is_ok = None;
        let answer = client.pipeline(&commands)?.pop().unwrap();
        match answer {
            Reply::Nil => attempt.is_ok = Some(false),
            Reply::Array(answers) => {
                attempt.is_ok = Some(true);
                let found = if watches { reads(&seen) } else { reads(&answers) };
                attempt.ops = [found, appended.clone()].concat().join(",");
            }
            Reply::Error(why) if why.starts_with("ERR") => attempt.is_ok = Some(false),
            Reply::Error(why) => {
                assert!(why.starts_with("UNKNOWN") || why.starts_with("COMMITTED"), "{why}");
            }
            other => panic!("{other:?}"),
        }
        Ok(())
    })();
    attempt.complete_us = start.elapsed().as_micros();
    (attempt, done)
}

/// Histories of `MULTI` and `WATCH` from several nodes while one is killed and started again.
fn history(protocol: &str) {
    let Rig { mut cluster, ports } = rig(protocol, &[]);
    let (start, next, committed) = (Instant::now(), AtomicU64::new(1), AtomicU64::new(0));
    let lines = Mutex::new(String::new());
    let ends = Mutex::new(false);
    std::thread::scope(|scope| {
        for process in 0..6_u64 {
            let (ports, next, committed, lines, ends) = (&ports, &next, &committed, &lines, &ends);
            scope.spawn(move || {
                let mut rng = Rng::stream(7, "redis history", process);
                let (mut at, mut client, mut count) = (process as usize, None, 0);
                while !*ends.lock().unwrap() {
                    let Some(connected) = &mut client else {
                        client = Client::connect(ports[at % 3]).ok();
                        at += usize::from(client.is_none());
                        continue;
                    };
                    let element = next.fetch_add(1, Ordering::Relaxed);
                    let (attempt, done) = append(connected, &mut rng, start, element);
                    if done.is_err() {
                        (client, at) = (None, at + 1);
                    }
                    count += 1;
                    let status = match attempt.is_ok {
                        Some(true) => "ok",
                        Some(false) => "fail",
                        None => "info",
                    };
                    committed.fetch_add(u64::from(status == "ok"), Ordering::Relaxed);
                    let complete = match attempt.is_ok {
                        Some(_) => format!("\"complete_us\":{},", attempt.complete_us),
                        None => String::new(),
                    };
                    writeln!(
                        lines.lock().unwrap(),
                        "{{\"txn\":\"c{}.{count}\",\"process\":{},\"region\":\"A\",\"priority\":\"low\",\
                         \"invoke_us\":{},{complete}\"status\":\"{status}\",\"ops\":[{}]}}",
                        process + 1,
                        process + 1,
                        attempt.invoke_us,
                        attempt.ops
                    )
                    .unwrap();
                }
            });
        }
        let more = |many: u64, what: &str| {
            let goal = committed.load(Ordering::Relaxed) + many;
            until(what, || committed.load(Ordering::Relaxed) >= goal);
        };
        more(100, "transactions commit");
        cluster.kill([3]);
        more(100, "transactions commit without n3");
        cluster.start([3]);
        more(100, "transactions commit with n3 again");
        *ends.lock().unwrap() = true;
    });
    let file = cluster.path().join("history.jsonl");
    std::fs::write(&file, lines.into_inner().unwrap()).unwrap();
    let checked = run(&["check", file.to_str().unwrap(), "--json"]);
    let (found, status) = json(&checked);
    assert_eq!(status, Some(0), "{protocol}: {found}");
}

#[test]
fn transactions_are_serializable_while_a_node_is_killed() {
    must_end_within(LIMIT);
    for protocol in ["carousel-fast", "2pl", "ocean-vista", "sloth", "geodesic"] {
        history(protocol);
    }
}

/// Producers push numbers through all nodes, and workers wait for them and move each to the end of
/// another list, while a node is killed and started again.
fn queue(protocol: &str) {
    let Rig { mut cluster, ports } = rig(protocol, &[]);
    let (next, moved) = (AtomicU64::new(1), AtomicU64::new(0));
    let (acknowledged, taken) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    let ends = Mutex::new(false);
    std::thread::scope(|scope| {
        for process in 0..6 {
            let (ports, next, moved, ends) = (&ports, &next, &moved, &ends);
            let (acknowledged, taken) = (&acknowledged, &taken);
            scope.spawn(move || {
                let (mut at, mut client) = (process, None);
                while !*ends.lock().unwrap() {
                    let Some(connected) = &mut client else {
                        client = Client::connect(ports[at % 3]).ok();
                        at += usize::from(client.is_none());
                        continue;
                    };
                    let element = next.fetch_add(1, Ordering::Relaxed).to_string();
                    let words: &[&str] = match process {
                        0 | 1 => &["RPUSH", "jobs", &element],
                        _ => &["BLMOVE", "jobs", "done", "LEFT", "RIGHT", "0.5"],
                    };
                    match connected.pipeline(&[words]).map(|mut answers| answers.remove(0)) {
                        Ok(Reply::Integer(_)) => acknowledged.lock().unwrap().push(element),
                        Ok(Reply::Bulk(element)) => {
                            taken.lock().unwrap().push(element);
                            moved.fetch_add(1, Ordering::Relaxed);
                        }
                        Ok(Reply::Nil | Reply::Error(_)) => {}
                        Ok(other) => panic!("{other:?}"),
                        Err(_) => (client, at) = (None, at + 1),
                    }
                }
            });
        }
        let more = |many: u64, what: &str| {
            let goal = moved.load(Ordering::Relaxed) + many;
            until(what, || moved.load(Ordering::Relaxed) >= goal);
        };
        more(100, "elements are moved");
        cluster.kill([3]);
        more(100, "elements are moved without n3");
        cluster.start([3]);
        more(100, "elements are moved with n3 again");
        *ends.lock().unwrap() = true;
    });
    let mut client = Client::connect(ports[0]).unwrap();
    while client.run("BLMOVE jobs done LEFT RIGHT 2") != Reply::Nil {}
    let done = list(&client.run("LRANGE done 0 -1"));
    let mut done: Vec<&str> = done.split(',').collect();
    let many = done.len();
    done.sort_unstable();
    done.dedup();
    assert_eq!(done.len(), many, "{protocol}: an element was moved twice");
    for element in acknowledged.into_inner().unwrap().iter().chain(&*taken.lock().unwrap()) {
        let is_there = done.binary_search(&element.as_str()).is_ok();
        assert!(is_there, "{protocol}: {element} was acknowledged, and is not there");
    }
}

#[test]
fn elements_of_a_queue_are_moved_once_while_a_node_is_killed() {
    must_end_within(LIMIT);
    for protocol in ["carousel-basic", "calvin", "geodesic"] {
        queue(protocol);
    }
}

#[test]
fn clients_of_redis_run_unmodified() {
    must_end_within(LIMIT);
    if !is_here("redis-benchmark", "--version") || !is_here("redis-cli", "--version") {
        return skipped("redis-tools is not installed");
    }
    let rig = rig("carousel-basic", &[]);
    let port = rig.ports[1].to_string();
    let mut benchmark = Command::new("redis-benchmark");
    benchmark.args(["-p", &port, "-n", "300", "-c", "10", "-P", "4", "-r", "100", "--csv"]);
    benchmark.args([
        "-t",
        "ping,set,get,incr,lpush,rpush,lpop,rpop,sadd,hset,spop,zadd,zpopmin,lrange_100,mset",
    ]);
    let output = processes::output(&mut benchmark);
    let said = text(&output.stdout) + &text(&output.stderr);
    assert!(output.status.success() && !said.contains("ERR"), "{said}");
    assert!(said.lines().filter(|line| line.starts_with('"')).count() >= 16, "{said}");
    let cli = |words: &[&str]| {
        let mut command = Command::new("redis-cli");
        let output = processes::output(command.args(["-p", &port, "-3"]).args(words));
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    assert_eq!(cli(&["SET", "k", "a b"]), "OK\n");
    assert_eq!(cli(&["GET", "k"]), "a b\n");
    assert_eq!(cli(&["HSET", "map", "f", "1"]), "1\n");
    // A map of RESP3: redis-cli writes each field and its value in a line.
    assert_eq!(cli(&["HGETALL", "map"]), "f 1\n");
    assert_eq!(cli(&["EVAL", "return {1, ARGV[1]}", "0", "x"]), "1\nx\n");
    assert!(cli(&["FCALL", "f", "0"]).contains("not available here"));
    let python = match tools::python() {
        Ok(python) => python,
        Err(why) => return skipped(&format!("no redis-py: {why}")),
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/redis_client.py");
    let output = processes::output(Command::new(python).arg(script).arg(&port));
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    assert_eq!(text(&output.stdout), "done\n");
}

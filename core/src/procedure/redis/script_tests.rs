//! Scripts: what they reach, what they answer, and what bounds them.

use bytes::Bytes;

use super::tests::{BYTES_MAX, LIMITS, Store, keys_of, show};
use super::*;
use crate::Rng;
use crate::ordered::OrdMap;

fn words(command: &str, script: &str, keys: &[&str], args: &[&str]) -> Vec<Bytes> {
    let count = keys.len().to_string();
    let head = [command, script, &count];
    let all = head.iter().chain(keys).chain(args);
    all.map(|word| Bytes::copy_from_slice(word.as_bytes())).collect()
}

impl Store {
    fn eval(&mut self, script: &str, keys: &[&str], args: &[&str]) -> String {
        self.run_words(&words("eval", script, keys, args))
    }
}

/// The answer of a script without keys.
fn answer(script: &str) -> String {
    Store::default().eval(script, &[], &["one", "two"])
}

#[test]
fn a_script_reads_and_changes_its_keys() {
    let mut store = Store::default();
    let script = "local n = tonumber(redis.call('GET', KEYS[1]) or 0) + ARGV[1]
        redis.call('SET', KEYS[1], n) redis.call('RPUSH', KEYS[2], n, ARGV[2])
        return redis.call('LRANGE', KEYS[2], 0, -1)";
    assert_eq!(store.eval(script, &["n", "l"], &["5", "x"]), r#"["5" "x"]"#);
    assert_eq!(store.eval(script, &["n", "l"], &["2", "y"]), r#"["5" "x" "7" "y"]"#);
    assert_eq!(store.run("GET n"), "\"7\"");
    // The same key twice.
    assert_eq!(
        store.eval(
            "redis.call('INCR', KEYS[1]) return redis.call('INCR', KEYS[2])",
            &["n", "n"],
            &[]
        ),
        ":9"
    );
    // The release of a lock, as clients write it.
    let release = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1])
        else return 0 end";
    store.run("SET lock me");
    assert_eq!(store.eval(release, &["lock"], &["other"]), ":0");
    assert_eq!(store.eval(release, &["lock"], &["me"]), ":1");
    assert_eq!(store.run("EXISTS lock"), ":0");
}

#[test]
fn values_become_answers_as_in_redis() {
    for (script, expected) in [
        ("return 1", ":1"),
        ("return 3.99", ":3"),
        ("return -3.99", ":-3"),
        ("return '3.99'", "\"3.99\""),
        ("return 2^53", ":9007199254740992"),
        ("return 1e300", ":9223372036854775807"),
        ("return 0/0", ":0"),
        ("return true", ":1"),
        ("return false", "nil"),
        ("return nil", "nil"),
        ("return", "nil"),
        ("", "nil"),
        ("return {1, 2, nil, 4}", "[:1 :2]"),
        ("return {1, {2, {'x'}}, true, false, 'y'}", "[:1 [:2 [\"x\"]] :1 nil \"y\"]"),
        ("return {}", "[]"),
        ("return {a = 1}", "[]"),
        ("return missing", "!"),
        ("return {ok = 'fine'}", "fine"),
        ("return {err = 'MY error'}", "!MY error"),
        ("return {err = '-MY error'}", "!MY error"),
        ("return {1, {err = 'MY error'}}", "[:1 !MY error]"),
        ("return redis.status_reply('fine')", "fine"),
        ("return redis.error_reply('My err')", "!My err"),
        ("return redis.error_reply('-My err')", "!My err"),
        ("return redis.error_reply('nospace')", "!ERR nospace"),
        ("return {double = 3.5}", ",3.5"),
        ("return {map = {a = 1}}", "{\"a\"=:1}"),
        ("return {set = {a = true}}", "~[\"a\"]"),
        ("return function() end", "nil"),
        ("return cjson.null", "nil"),
        ("return KEYS", "[]"),
        ("return ARGV", "[\"one\" \"two\"]"),
        ("return {#KEYS, #ARGV, ARGV[2], ARGV[3] == nil}", "[:0 :2 \"two\" :1]"),
        ("return redis.sha1hex('')", "\"da39a3ee5e6b4b0d3255bfef95601890afd80709\""),
        ("return redis.replicate_commands()", ":1"),
        ("redis.log(redis.LOG_WARNING, 'x') redis.set_repl(redis.REPL_ALL) return 1", ":1"),
        ("redis.setresp(2) return redis.REDIS_VERSION", "\"7.0.15\""),
        ("return string.format('%x', redis.REDIS_VERSION_NUM)", "\"7000f\""),
        ("return redis.call('PING')", "PONG"),
        ("return redis.call('ECHO', 5)", "\"5\""),
        ("return redis.pcall('nope')", "!ERR Unknown Redis command called from script"),
    ] {
        let found = answer(script);
        let found = if expected == "!" { found.get(..1).unwrap() } else { &found };
        assert_eq!(found, expected, "{script}");
    }
}

#[test]
fn answers_become_values_as_in_redis() {
    let mut store = Store::default();
    store.script(
        "SET s text => OK
         HSET h f 1 g 2 => :2
         ZADD z 1.5 a 2 b => :2
         SADD set b a => :2",
    );
    for (script, expected) in [
        ("return type(redis.call('GET', KEYS[1]))", "\"string\""),
        ("return type(redis.call('STRLEN', KEYS[1]))", "\"number\""),
        ("return type(redis.call('GET', KEYS[5]))", "\"boolean\""),
        ("return redis.call('SET', KEYS[1], 'text').ok", "\"OK\""),
        ("return redis.call('TYPE', KEYS[2]).ok", "\"hash\""),
        (
            "return redis.pcall('HGET', KEYS[1], 'f').err",
            "\"WRONGTYPE Operation against a key \
         holding the wrong kind of value\"",
        ),
        ("return redis.call('HGETALL', KEYS[2])", "[\"f\" \"1\" \"g\" \"2\"]"),
        (
            "return redis.call('ZRANGE', KEYS[3], 0, -1, 'WITHSCORES')",
            "[\"a\" \"1.5\" \"b\" \"2\"]",
        ),
        ("return redis.call('ZSCORE', KEYS[3], 'a')", "\"1.5\""),
        ("return redis.call('SMEMBERS', KEYS[4])", "[\"a\" \"b\"]"),
        ("return redis.call('HMGET', KEYS[2], 'f', 'x', 'g')", "[\"1\" nil \"2\"]"),
        // Numbers name themselves exactly.
        (
            "redis.call('SET', KEYS[5], 0.1) return redis.call('GET', KEYS[5])",
            "\"0.10000000000000001\"",
        ),
        ("redis.call('SET', KEYS[5], 3) return redis.call('GET', KEYS[5])", "\"3\""),
        ("redis.call('SET', KEYS[5], 1e20) return redis.call('GET', KEYS[5])", "\"1e+20\""),
        ("return redis.call('DEL', KEYS[5])", ":1"),
    ] {
        assert_eq!(store.eval(script, &["s", "h", "z", "set", "none"], &[]), expected, "{script}");
    }
}

#[test]
fn a_script_reaches_only_the_keys_that_it_declares() {
    let mut store = Store::default();
    store.run("SET secret 1");
    for script in
        ["return redis.call('GET', 'secret')", "return redis.call('MGET', KEYS[1], 'secret')"]
    {
        let refused = store.eval(script, &["a"], &[]);
        assert!(refused.starts_with(
            "!ERR the script did not declare the key 'secret'; pass every key that a script uses as \
             one of its KEYS"
        ), "{refused}");
    }
    store.eval("redis.pcall('DEL', 'secret')", &["a"], &[]);
    assert_eq!(store.run("GET secret"), "\"1\"");
    for command in ["eval", "multi", "SELECT", "watch", "script", "client", "auth"] {
        let refused = answer(&format!("return redis.call('{command}', 'x', 0)"));
        assert!(
            refused.starts_with("!ERR This Redis command is not allowed from script"),
            "{refused}"
        );
    }
}

#[test]
fn errors_say_the_script_and_the_line() {
    let name = |script: &str| script::digest(script.as_bytes());
    for (script, expected) in [
        ("error('boo')", "ERR user_script:1: boo script: {}, on @user_script:1."),
        ("\nerror({err = 'MY x'})", "MY x script: {}, on @user_script:2."),
        ("error({})", "ERR unknown error script: {}, on @user_script:1."),
        (
            "x = 1",
            "ERR user_script:1: Attempt to modify a readonly table script: {}, on @user_script:1.",
        ),
        (
            "return x",
            "ERR user_script:1: Script attempted to access nonexistent global variable 'x' \
          script: {}, on @user_script:1.",
        ),
        (
            "return redis.call('set', 'a')",
            "ERR Wrong number of args calling Redis command from script \
          script: {}, on @user_script:1.",
        ),
        (
            "return redis.call('nope')",
            "ERR Unknown Redis command called from script script: {}, on \
          @user_script:1.",
        ),
        (
            "return redis.call()",
            "ERR Please specify at least one argument for this redis lib call \
          script: {}, on @user_script:1.",
        ),
        (
            "return redis.call('get', {})",
            "ERR Lua redis lib command arguments must be strings or \
          integers script: {}, on @user_script:1.",
        ),
        (
            "local function f()\n redis.call('nope') end\n pcall(f)\n error('y')",
            "ERR user_script:4: y script: {}, on @user_script:4.",
        ),
    ] {
        assert_eq!(
            answer(script),
            format!("!{}", expected.replace("{}", &name(script))),
            "{script}"
        );
    }
    let refused =
        "!ERR Error compiling script (new function): user_script:1: '=' expected near 'y'";
    assert_eq!(answer("x y"), refused);
    assert_eq!(
        script::check(b"x y").map_err(|failure| format!("!{}", failure.0)),
        Err(refused.into())
    );
    assert_eq!(script::check(b"return 1"), Ok(()));
    // A script catches the text of an error.
    assert_eq!(
        answer("local ok, e = pcall(redis.call, 'nope') return {tostring(ok), e}"),
        "[\"false\" \"ERR Unknown Redis command called from script\"]"
    );
    for (line, refused) in [
        ("EVAL x -1", "ERR Number of keys can't be negative"),
        ("EVAL x 2 a", "ERR Number of keys can't be greater than number of args"),
        ("EVAL x y", "ERR value is not an integer or out of range"),
        ("EVAL x", "ERR wrong number of arguments for 'eval' command"),
        ("EVALSHA abc 0", "NOSCRIPT No matching script. Please use EVAL."),
        ("EVALSHA_RO abc 1 a b", "NOSCRIPT No matching script. Please use EVAL."),
    ] {
        assert_eq!(Store::default().run(line), format!("!{refused}"), "{line}");
    }
}

#[test]
fn a_script_whose_answer_is_an_error_changes_nothing() {
    let mut store = Store::default();
    store.script(
        "SET s before => OK
         RPUSH l 1 2 => :2",
    );
    let changes = "redis.call('SET', KEYS[1], 'after') redis.call('RPUSH', KEYS[2], 3)
        redis.call('SET', KEYS[3], 'new') redis.call('APPEND', KEYS[1], '!') ";
    for end in [
        "error('no')",
        "return redis.error_reply('NO way')",
        "redis.call('INCR', KEYS[2])",
        "return redis.call('GET', KEYS[2])",
        "return nothing",
    ] {
        let keys = ["s", "l", "new"];
        assert!(store.eval(&format!("{changes}{end}"), &keys, &[]).starts_with('!'), "{end}");
        store.script(
            "GET s => \"before\"
             LRANGE l 0 -1 => [\"1\" \"2\"]
             EXISTS new => :0",
        );
    }
    // In one batch, what came before it stays, and what comes after it sees that.
    let failing = words("eval", &format!("{changes}error('no')"), &["s", "l", "new"], &[]);
    let line = |text: &str| text.split(' ').map(|word| word.to_owned().into()).collect();
    let all: [Vec<Bytes>; 5] =
        [line("SET s middle"), line("DEL l"), failing, line("APPEND s +"), line("RPUSH l x")];
    let mut names = KeyNames::default();
    let commands = all.iter().map(|words| parse(words, &mut names, LIMITS).unwrap().unwrap());
    let commands = commands.collect();
    store.batch(&names, commands, &[]).unwrap();
    store.script(
        "GET s => \"middle+\"
         LRANGE l 0 -1 => [\"x\"]
         EXISTS new => :0",
    );
    // An error that the script handles undoes nothing.
    let handled = "redis.call('SET', KEYS[1], 'kept') redis.pcall('INCR', KEYS[1]) return 'done'";
    assert_eq!(store.eval(handled, &["s"], &[]), "\"done\"");
    assert_eq!(store.run("GET s"), "\"kept\"");
}

#[test]
fn a_failed_script_leaves_no_stamp() {
    let mut store = Store::default();
    store.run("SET a 1");
    let before = store.values.clone();
    store.eval("redis.call('INCR', KEYS[1]) error('no')", &["a"], &[]);
    assert_eq!(store.values, before);
    store.eval("return redis.call('GET', KEYS[1])", &["a"], &[]);
    assert_eq!(store.values, before, "what a script only read has not changed");
    store.eval("return redis.call('INCR', KEYS[1])", &["a"], &[]);
    assert_ne!(store.values, before);
}

#[test]
fn read_only_scripts_change_nothing() {
    let mut store = Store::default();
    store.run("SET a 1");
    let read = "return redis.call('GET', KEYS[1])";
    let write = "return redis.call('SET', KEYS[1], 2)";
    let refused = "!ERR Write commands are not allowed from read-only scripts.";
    assert_eq!(store.run_words(&words("EVAL_RO", read, &["a"], &[])), "\"1\"");
    assert!(store.run_words(&words("EVAL_RO", write, &["a"], &[])).starts_with(refused));
    let flagged = |flags: &str, text: &str| format!("#!lua flags={flags}\n{text}");
    let all = "no-writes,allow-stale,allow-oom,no-cluster,allow-cross-slot-keys";
    assert_eq!(store.eval(&flagged(all, read), &["a"], &[]), "\"1\"");
    assert!(store.eval(&flagged("no-writes", write), &["a"], &[]).starts_with(refused));
    assert_eq!(store.eval(&flagged("allow-oom", write), &["a"], &[]), "OK");
    assert_eq!(
        store.run_words(&words("EVAL_RO", &flagged("allow-oom", read), &["a"], &[])),
        "!ERR Can not execute a script with write flag using *_ro command."
    );
    for (script, error) in [
        (flagged("fast", read), "ERR Unexpected flag in script shebang: fast"),
        ("#!python\nreturn 1".into(), "ERR Unexpected engine in script shebang: #!python"),
        ("#!lua name=x\nreturn 1".into(), "ERR Unknown lua shebang option: name=x"),
        ("#!lua".into(), "ERR Invalid script shebang"),
    ] {
        assert_eq!(store.eval(&script, &["a"], &[]), format!("!{error}"), "{script}");
        assert_eq!(
            script::check(script.as_bytes()).map_err(|failure| failure.0.into_owned()),
            Err(error.to_owned())
        );
    }
    let command = |name: &str, text: &str| {
        let mut names = KeyNames::default();
        parse(&words(name, text, &["a", "b"], &[]), &mut names, LIMITS).unwrap().unwrap()
    };
    assert_eq!(command("eval", read).uses(), [(0, Use::Change), (1, Use::Change)]);
    assert_eq!(command("eval_ro", read).uses(), [(0, Use::Read), (1, Use::Read)]);
    assert!(command("eval", &flagged("no-writes", read)).is_read_only());
}

#[test]
fn keys_expire_for_scripts_and_time_is_that_of_the_transaction() {
    let mut store = Store { now_ms: 1_234_567, ..Store::default() };
    assert_eq!(store.eval("return redis.call('TIME')", &[], &[]), "[\"1234\" \"567000\"]");
    let set = "return redis.call('SET', KEYS[1], 1, 'PX', ARGV[1])";
    assert_eq!(store.eval(set, &["a"], &["100"]), "OK");
    let ttl = words("eval_ro", "return redis.call('PTTL', KEYS[1])", &["a"], &[]);
    assert_eq!(store.run_words(&ttl), ":100");
    store.now_ms += 100;
    assert_eq!(store.run_words(&ttl), ":-2");
    assert!(store.values.is_empty(), "the read removed it");
}

/// Runs a batch at two gateways and at two replicas.
fn everywhere(store: &Store, all: &[Vec<Bytes>]) -> (Evaluation, Results) {
    let first = at_both(store, all);
    assert_eq!(first, at_both(store, all), "two runs differ");
    first
}

/// Runs a batch at a gateway and at a replica.
fn at_both(store: &Store, all: &[Vec<Bytes>]) -> (Evaluation, Results) {
    let mut names = KeyNames::default();
    let commands = all.iter().map(|words| parse(words, &mut names, LIMITS).unwrap().unwrap());
    let commands: Vec<Command> = commands.collect();
    let mut batch = Batch::new(names.names().len(), commands, Vec::new(), true);
    (batch.now_ms, batch.stamp) = (5_000, Stamp { client: 1, counter: 1 });
    let value = |key: usize| store.values.get(&names.names()[key].1).cloned();
    let found = batch.evaluate(value, BYTES_MAX);
    let call = batch.call(&keys_of(&names));
    let reads: Vec<_> =
        call.reads.iter().map(|key| store.values.get(key.bytes()).cloned()).collect();
    let ran = call.run(&reads);
    assert_eq!(ran == Err(AbortReason::TooLarge), found.is_too_large, "they count alike");
    (found, ran)
}

#[test]
fn every_replica_computes_the_same() {
    let mut store = Store::default();
    store.run("SADD set a b c d e f g");
    let script = "
        local seen, out = {}, {}
        for i = 1, 200 do
            local t, f = {}, function() return i end
            seen[t] = i seen[f] = -i seen['k' .. (i * 7919 % 211)] = i
        end
        for key, value in pairs(seen) do out[#out + 1] = tostring(key) .. '=' .. tostring(value) end
        for i = 1, 50 do
            out[#out + 1] = math.random() .. ' ' .. math.sin(i) ^ 1.7 .. ' ' .. math.random(1000)
        end
        redis.call('RPUSH', KEYS[1], unpack(out))
        redis.call('SET', KEYS[2], cjson.encode(seen and redis.call('TIME')) .. cmsgpack.pack(out))
        return {redis.call('SPOP', KEYS[3], 3), tostring(0/0), tostring({}), #out}";
    let all = [words("eval", script, &["l", "s", "set"], &[])];
    let (found, ran) = everywhere(&store, &all);
    assert!(matches!(found.replies[0], Reply::Array(_)), "{}", show(&found.replies[0]));
    assert!(ran.unwrap().iter().flatten().any(|value| value.len() > 5_000));
}

#[test]
fn the_work_of_a_script_counts_among_that_of_its_transaction() {
    let mut store = Store::default();
    let members: Vec<String> = (0..40_000).map(|number| format!("{number:06}")).collect();
    store.run(&format!("SADD set {}", members.join(" ")));
    store.run(&format!("SET big {}", "x".repeat(500_000)));
    let eval = |script: &str| words("eval", script, &["set", "big", "n"], &[]);
    let set = |value: &str| -> Vec<Bytes> {
        ["set", "n", value].iter().map(|word| Bytes::from((*word).to_owned())).collect()
    };
    for script in [
        "pcall(function() while true do end end)",
        "while true do redis.pcall('SMEMBERS', KEYS[1]) end",
        "while true do redis.call('SUNIONSTORE', KEYS[3], KEYS[1]) end",
        "while true do redis.call('GET', KEYS[2]) end",
        "while true do redis.call('APPEND', KEYS[2], 'x') end",
        "while true do redis.pcall('nope') end",
        "local t = {} t[1], t[2] = t, t return t",
        "return redis.call('ECHO', string.rep('x', 1e8))",
    ] {
        // After other commands: nothing of the transaction happens.
        let (found, ran) = at_both(&store, &[set("1"), eval(script), set("2")]);
        assert!(found.is_too_large && ran.is_err(), "{script}");
        assert!(found.replies.is_empty());
    }
    // Scripts and commands count together, read-only ones as well.
    let half = "for i = 1, 2e6 do end";
    assert!(at_both(&store, &[eval(half), set("1")]).1.is_ok());
    let many = vec![eval(half); 9];
    assert!(at_both(&store, &many).0.is_too_large);
    let mut many = vec![words("eval_ro", half, &["set"], &[]); 9];
    many.push(set("1"));
    assert!(at_both(&store, &many).0.is_too_large, "read-only scripts count for replicas");
    // The first change of a key by a script counts what the key holds, each time.
    let change = vec![eval("redis.call('SADD', KEYS[1], '000001')"); 80];
    assert!(at_both(&store, &change).0.is_too_large);
    let fails = vec![eval("redis.call('SADD', KEYS[1], 'new') error('x')"); 80];
    assert!(at_both(&store, &fails).0.is_too_large);
}

#[test]
fn a_script_travels_with_its_text() {
    let mut names = KeyNames::default();
    let words = words("eval", "return ARGV[1]", &["a"], &["x"]);
    let command = parse(&words, &mut names, LIMITS).unwrap().unwrap();
    let batch = Batch::new(1, vec![command], Vec::new(), false);
    let decoded: Batch = wire::decode(&wire::encode(&batch)).unwrap();
    assert_eq!(decoded, batch);
    let text = b"return ARGV[1]";
    assert!(wire::encode(&batch).windows(text.len()).any(|part| part == text));
    // A script that names a key that its batch lacks fails the guard.
    let call = batch.call(&keys_of(&names));
    assert!(call.run(&[None]).is_ok());
    let mut few = batch;
    few.keys.clear();
    assert_eq!(few.call(&keys_of(&names)).run(&[]), Err(AbortReason::Guard));
}

/// Scripts of random commands are the same as the commands.
#[test]
fn a_script_of_commands_is_its_commands() {
    let lines = [
        "SET a 5",
        "INCR a",
        "GET a",
        "APPEND b x",
        "RPUSH c 1 2",
        "LPOP c",
        "DEL a b",
        "SADD b y",
        "SMEMBERS b",
        "HSET c f 1",
        "HGETALL c",
        "EXPIRE a 1",
        "TTL a",
        "RENAME a b",
        "ZADD a 1 m 2 n",
        "ZRANGE a 0 -1 WITHSCORES",
        "MGET a b c",
        "TYPE a",
        "EXISTS a b c",
    ];
    let mut ran = 0;
    for seed in 0..300 {
        let mut rng = Rng::stream(seed, "scripts", 0);
        let (mut scripted, mut plain) = (Store::default(), Store::default());
        for round in 0..10 {
            (scripted.now_ms, plain.now_ms) = (round * 700, round * 700);
            let line = *rng.pick(&lines).unwrap();
            let script = "return redis.pcall(unpack(ARGV))";
            let args: Vec<&str> = line.split(' ').collect();
            let found = scripted.eval(script, &["a", "b", "c"], &args);
            let expected = plain.run(line);
            // An answer without structure of its own.
            let flat = |text: &str| {
                let text = text.replace(['~', '{', '}', '<', '>', '[', ']'], "");
                let text = text.replace(['=', ' '], " ");
                text.replace(['"', ':'], "")
            };
            assert_eq!(flat(&found), flat(&expected), "seed {seed}: {line}");
            ran += usize::from(!found.starts_with('!'));
        }
        let contents = |store: &Store| -> OrdMap<Bytes, (Content, u64)> {
            let entry = |value: &Value| entry::Entry::decode(value).unwrap();
            let all = store.values.iter().map(|(key, value)| (key.clone(), entry(value)));
            let all = all.filter(|(_, entry)| entry.expires_ms == 0 || entry.expires_ms > 9 * 700);
            all.map(|(key, entry)| (key, (entry.content, entry.expires_ms))).collect()
        };
        assert_eq!(contents(&scripted), contents(&plain), "seed {seed}");
    }
    assert!(ran > 1_500, "{ran} commands ran");
}

//! Each command by script, and batches against their commands one by one.

use bytes::Bytes;

use super::*;
use crate::Rng;
use crate::ordered::OrdMap;
use crate::txn::VALUE_BYTES_MAX;

pub(super) const LIMITS: KeyLimits = KeyLimits { keys_max: 100, key_bytes_max: 100 };
pub(super) const BYTES_MAX: usize = 16 << 20;

/// A store that runs batches as the database does: through the bytes of a call.
#[derive(Default)]
pub(super) struct Store {
    pub(super) values: OrdMap<Bytes, Value>,
    pub(super) now_ms: u64,
    pub(super) counter: u64,
}

pub(super) fn keys_of(names: &KeyNames) -> Vec<Key> {
    names.names().iter().map(|(_, name)| Key::from(name)).collect()
}

/// Why a batch had no effect.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct Aborted;

impl Store {
    /// Reads the commands of a batch; a command that is refused answers with an error.
    fn parse(lines: &[&str]) -> (KeyNames, Vec<Command>) {
        let mut names = KeyNames::default();
        let commands = lines.iter().map(|line| {
            let words = words(line);
            parse(&words, &mut names, LIMITS)
                .unwrap_or_else(|| panic!("no command: {line}"))
                .unwrap()
        });
        let commands = commands.collect();
        (names, commands)
    }

    /// Runs commands as one transaction, as a gateway does.
    pub(super) fn batch(
        &mut self,
        names: &KeyNames,
        commands: Vec<Command>,
        watched: &[(u32, Option<Stamp>)],
    ) -> Result<Evaluation, Aborted> {
        let keys = keys_of(names);
        self.counter += 1;
        for is_wide in [false, true] {
            let mut batch = Batch::new(keys.len(), commands.clone(), watched.to_vec(), is_wide);
            (batch.now_ms, batch.stamp) = (self.now_ms, Stamp { client: 7, counter: self.counter });
            let value = |key: usize| self.values.get(&names.names()[key].1).cloned();
            let evaluation = batch.evaluate(value, BYTES_MAX);
            if batch.is_read_only() {
                if evaluation.needs_more_writes {
                    continue;
                }
                return if evaluation.is_watch_kept { Ok(evaluation) } else { Err(Aborted) };
            }
            let call = batch.call(&keys);
            let reads: Vec<_> =
                call.reads.iter().map(|key| self.values.get(key.bytes()).cloned()).collect();
            match call.run(&reads) {
                Ok(results) => {
                    assert!(evaluation.is_watch_kept && !evaluation.needs_more_writes);
                    for (key, value) in call.writes.into_iter().zip(results) {
                        match value {
                            Some(value) => {
                                assert!(value.len() <= VALUE_BYTES_MAX);
                                self.values.insert(key.to_bytes(), value);
                            }
                            None => drop(self.values.remove(key.bytes())),
                        }
                    }
                    return Ok(evaluation);
                }
                Err(reason) => assert_eq!(reason, AbortReason::Guard),
            }
        }
        Err(Aborted)
    }

    /// Runs one command, and shows its answer.
    pub(super) fn run(&mut self, line: &str) -> String {
        self.run_words(&words(line))
    }

    /// Runs one command, and shows its answer.
    pub(super) fn run_words(&mut self, words: &[Bytes]) -> String {
        let mut names = KeyNames::default();
        match parse(words, &mut names, LIMITS).unwrap_or_else(|| panic!("no command: {words:?}")) {
            Ok(command) => show(&self.batch(&names, vec![command], &[]).unwrap().replies[0]),
            Err(refused) => show(&Reply::Error(refused.failure)),
        }
    }

    /// Checks lines of the form `command => answer`.
    pub(super) fn script(&mut self, text: &str) {
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let (command, answer) = line.split_once(" => ").unwrap();
            assert_eq!(self.run(command), answer, "{command}");
        }
    }
}

/// Words; `''` is the empty one.
fn words(line: &str) -> Vec<Bytes> {
    let word = |word: &str| if word == "''" { Bytes::new() } else { Bytes::from(word.to_owned()) };
    line.split(' ').map(word).collect()
}

pub(super) fn show(reply: &Reply) -> String {
    let all = |items: &[Reply]| items.iter().map(show).collect::<Vec<_>>().join(" ");
    match reply {
        Reply::Status(text) => (*text).to_owned(),
        Reply::Line(text) => text.clone(),
        Reply::Integer(number) => format!(":{number}"),
        Reply::Bulk(text) => format!("\"{}\"", text.escape_ascii()),
        Reply::Nil => "nil".to_owned(),
        Reply::NilArray => "nil-array".to_owned(),
        Reply::Double(score) => format!(",{score}"),
        Reply::Array(items) => format!("[{}]", all(items)),
        Reply::Set(items) => format!("~[{}]", all(items)),
        Reply::Map(items) => {
            let pair = |(name, value): &(Reply, Reply)| format!("{}={}", show(name), show(value));
            format!("{{{}}}", items.iter().map(pair).collect::<Vec<_>>().join(" "))
        }
        Reply::Pairs(items) => {
            let pair = |(name, score): &(Bytes, number::Score)| {
                format!("\"{}\"={score}", name.escape_ascii())
            };
            format!("<{}>", items.iter().map(pair).collect::<Vec<_>>().join(" "))
        }
        Reply::Couples(items) => {
            let pair = |(name, value): &(Bytes, Bytes)| {
                format!("\"{}\"=\"{}\"", name.escape_ascii(), value.escape_ascii())
            };
            format!("<{}>", items.iter().map(pair).collect::<Vec<_>>().join(" "))
        }
        Reply::Error(failure) => format!("!{}", failure.0),
    }
}

#[test]
fn strings_and_counters() {
    Store::default().script(
        r#"
        GET a => nil
        SET a 1 => OK
        GET a => "1"
        SET a 2 NX => nil
        SET b 2 XX => nil
        SET a 3 XX GET => "1"
        SET c 1 NX GET => nil
        SET c 1 NX XX => !ERR syntax error
        SET c 1 EX 5 PX 5 => !ERR syntax error
        SETNX a 4 => :0
        SETNX d 4 => :1
        GETSET d 5 => "4"
        GETDEL d => "5"
        GETDEL d => nil
        APPEND d xyz => :3
        APPEND d w => :4
        STRLEN d => :4
        STRLEN nothing => :0
        GETRANGE d 1 -2 => "yz"
        GETRANGE d 5 9 => ""
        GETRANGE d 0 -9 => "x"
        GETRANGE d -9 -8 => "x"
        GETRANGE d -2 -9 => ""
        GETRANGE d 1 -9 => ""
        SETRANGE d 6 end => :9
        GET d => "xyzw\x00\x00end"
        SETRANGE d -1 x => !ERR offset is out of range
        SETRANGE nothing 5 '' => :0
        EXISTS nothing d a => :2
        INCR n => :1
        INCRBY n 9223372036854775806 => :9223372036854775807
        INCR n => !ERR increment or decrement would overflow
        DECR n => :9223372036854775806
        DECRBY n -9223372036854775808 => !ERR increment or decrement would overflow
        INCR d => !ERR value is not an integer or out of range
        INCRBY n 1.5 => !ERR value is not an integer or out of range
        INCRBYFLOAT f 0.1 => "0.1"
        INCRBYFLOAT f 0.2 => "0.3"
        INCRBYFLOAT f x => !ERR value is not a valid float
        MSET x 1 y 2 x 3 => OK
        MGET x y z => ["3" "2" nil]
        MSETNX z 1 x 1 => :0
        MSETNX z 1 w 1 => :1
        MSET x => !ERR wrong number of arguments for 'mset' command
        MSET x 1 y => !ERR wrong number of arguments for 'mset' command
        GET => !ERR wrong number of arguments for 'get' command
        DEL x y z nothing => :3
        TYPE a => string
        TYPE nothing => none
        RENAME a aa => OK
        GET aa => "3"
        RENAME a aa => !ERR no such key
        RENAMENX aa d => :0
        "#,
    );
}

#[test]
fn hashes_and_sets() {
    Store::default().script(
        r#"
        HSET h a 1 b 2 => :2
        HSET h a 3 c 4 => :1
        HSET h a => !ERR wrong number of arguments for 'hset' command
        HMSET h d 5 => OK
        HGET h a => "3"
        HGET h x => nil
        HMGET h a x b => ["3" nil "2"]
        HGETALL h => {"a"="3" "b"="2" "c"="4" "d"="5"}
        HGETALL nothing => {}
        HKEYS h => ["a" "b" "c" "d"]
        HVALS h => ["3" "2" "4" "5"]
        HLEN h => :4
        HEXISTS h a => :1
        HSTRLEN h a => :1
        HSETNX h a 9 => :0
        HSETNX h e 9 => :1
        HINCRBY h a 4 => :7
        HINCRBY h new -4 => :-4
        HINCRBYFLOAT h a 0.5 => "7.5"
        HINCRBY h a 4 => !ERR hash value is not an integer
        HDEL h a x => :1
        HDEL h b c d e new => :5
        EXISTS h => :0
        SADD s a b a => :2
        SADD s b c => :1
        SMEMBERS s => ~["a" "b" "c"]
        SISMEMBER s a => :1
        SMISMEMBER s a x => [:1 :0]
        SCARD s => :3
        SADD t b c d => :3
        SINTER s t => ~["b" "c"]
        SUNION s t => ~["a" "b" "c" "d"]
        SDIFF s t => ~["a"]
        SINTERSTORE u s t => :2
        SDIFFSTORE u nothing t => :0
        EXISTS u => :0
        SMOVE s t a => :1
        SMOVE s t a => :0
        SREM s a b => :1
        SPOP s => "c"
        SPOP s => nil
        SPOP t 0 => ~[]
        SPOP t 9 => ~["a" "b" "c" "d"]
        EXISTS s t => :0
        SET k v => OK
        HGET k a => !WRONGTYPE Operation against a key holding the wrong kind of value
        SADD k a => !WRONGTYPE Operation against a key holding the wrong kind of value
        LPUSH k a => !WRONGTYPE Operation against a key holding the wrong kind of value
        ZADD k 1 a => !WRONGTYPE Operation against a key holding the wrong kind of value
        HSET h a 1 => :1
        GET h => !WRONGTYPE Operation against a key holding the wrong kind of value
        INCR h => !WRONGTYPE Operation against a key holding the wrong kind of value
        MGET h k => [nil "v"]
        SINTER k s => !WRONGTYPE Operation against a key holding the wrong kind of value
        TYPE h => hash
        SET h now-a-string => OK
        "#,
    );
}

#[test]
fn lists_and_sorted_sets() {
    Store::default().script(
        r#"
        RPUSH l b c => :2
        LPUSH l a z => :4
        LRANGE l 0 -1 => ["z" "a" "b" "c"]
        LRANGE l 5 9 => []
        LLEN l => :4
        LINDEX l -1 => "c"
        LINDEX l 4 => nil
        LSET l 1 A => OK
        LSET l 9 A => !ERR index out of range
        LSET nothing 0 A => !ERR no such key
        LPOP l => "z"
        RPOP l 2 => ["c" "b"]
        LPOP nothing => nil
        LPOP nothing 2 => nil-array
        LPUSHX nothing a => :0
        RPUSHX l x x y x => :5
        LREM l -2 x => :2
        LRANGE l 0 -1 => ["A" "x" "y"]
        LREM l 0 x => :1
        RPUSH l c d => :4
        LTRIM l 1 2 => OK
        LRANGE l 0 -1 => ["y" "c"]
        LMOVE l m LEFT RIGHT => "y"
        LMOVE l l LEFT RIGHT => "c"
        RPOPLPUSH l m => "c"
        LRANGE m 0 -1 => ["c" "y"]
        EXISTS l => :0
        LMOVE l m LEFT LEFT => nil
        LMOVE m m UP LEFT => !ERR syntax error
        ZADD z 2 b 1 a => :2
        ZADD z 3 b => :0
        ZADD z CH 4 b 5 c => :2
        ZADD z NX 9 b 9 d => :1
        ZADD z XX GT CH 3 b 6 c => :1
        ZADD z INCR 1 a => ,2
        ZADD z NX INCR 1 a => nil
        ZADD z NX XX 1 a => !ERR XX and NX options at the same time are not compatible
        ZADD z x a => !ERR value is not a valid float
        ZADD z 1e400 a => !ERR value is not a valid float
        ZRANGE z 0 -1 WITHSCORES => <"a"=2 "b"=4 "c"=6 "d"=9>
        ZRANGE z (2 6 BYSCORE => ["b" "c"]
        ZRANGE z +inf -inf BYSCORE REV LIMIT 1 2 => ["c" "b"]
        ZRANGE z 0 1 REV => ["d" "c"]
        ZREVRANGE z 0 0 => ["d"]
        ZRANGEBYSCORE z 4 +inf WITHSCORES LIMIT 0 1 => <"b"=4>
        ZREVRANGEBYSCORE z (9 2 => ["c" "b" "a"]
        ZRANGEBYSCORE z x 2 => !ERR min or max is not a float
        ZRANK z c => :2
        ZREVRANK z c => :1
        ZRANK z x => nil
        ZSCORE z c => ,6
        ZMSCORE z c x => [,6 nil]
        ZCARD z => :4
        ZCOUNT z 4 9 => :3
        ZINCRBY z 0.5 a => ,2.5
        ZINCRBY z inf a => ,inf
        ZINCRBY z -inf a => !ERR resulting score is not a number (NaN)
        ZREM z a x => :1
        ZPOPMIN z => ["b" ,4]
        ZPOPMAX z 9 => <"d"=9 "c"=6>
        EXISTS z => :0
        ZADD z 1 a 2 b 3 c => :3
        ZREMRANGEBYSCORE z (1 2 => :1
        ZREMRANGEBYRANK z -1 -1 => :1
        ZRANGE z 0 -1 => ["a"]
        ZRANGE z 0 -1 BYLEX => !ERR min or max not valid string range item
        "#,
    );
}

#[test]
fn elements_of_lists_are_found_and_taken_from_the_first_key_that_has_any() {
    Store::default().script(
        r#"
        RPUSH l a b a c a => :5
        LPOS l a => :0
        LPOS l x => nil
        LPOS l a RANK 2 => :2
        LPOS l a RANK -1 => :4
        LPOS l a COUNT 0 => [:0 :2 :4]
        LPOS l a RANK -1 COUNT 2 MAXLEN 3 => [:4 :2]
        LPOS l a RANK 2 COUNT 0 MAXLEN 3 => [:2]
        LPOS l x COUNT 1 => []
        LPOS nothing a => nil
        LPOS nothing a COUNT 1 => []
        LPOS l a RANK 0 => !ERR RANK can't be zero: use 1 to start from the first match, 2 from the second ... or use negative to start from the end of the list
        LPOS l a COUNT -1 => !ERR COUNT can't be negative
        LPOS l a MAXLEN x => !ERR MAXLEN can't be negative
        LPOS l a RANK => !ERR syntax error
        LINSERT l BEFORE b x => :6
        LINSERT l after c y => :7
        LRANGE l 0 -1 => ["a" "x" "b" "a" "c" "y" "a"]
        LINSERT l AFTER nothing y => :-1
        LINSERT nothing AFTER a y => :0
        LINSERT l BESIDE a y => !ERR syntax error
        LMPOP 2 nothing l LEFT => ["l" ["a"]]
        LMPOP 1 l RIGHT COUNT 2 => ["l" ["a" "y"]]
        LMPOP 1 nothing LEFT => nil-array
        LMPOP 0 l LEFT => !ERR numkeys should be greater than 0
        LMPOP 1 l UP => !ERR syntax error
        LMPOP 2 l LEFT => !ERR syntax error
        LMPOP 1 l LEFT COUNT 0 => !ERR count should be greater than 0
        LMPOP 1 l LEFT COUNT 1 COUNT 1 => !ERR syntax error
        SET t 1 => OK
        LMPOP 2 l t LEFT COUNT 9 => ["l" ["x" "b" "a" "c"]]
        EXISTS l => :0
        LMPOP 2 l t LEFT => !WRONGTYPE Operation against a key holding the wrong kind of value
        ZADD z 1 a 2 b 3 c => :3
        ZMPOP 2 nothing z MAX => ["z" [["c" ,3]]]
        ZMPOP 1 z MIN COUNT 9 => ["z" [["a" ,1] ["b" ,2]]]
        ZMPOP 1 z MIN => nil-array
        "#,
    );
}

#[test]
fn sorted_sets_are_combined() {
    Store::default().script(
        r#"
        ZADD a 1 x 2 y 3 z => :3
        ZADD b 10 y 20 z 30 w => :3
        SADD s y w => :2
        ZUNION 2 a b => ["x" "y" "z" "w"]
        ZUNION 2 a b WITHSCORES => <"x"=1 "y"=12 "z"=23 "w"=30>
        ZUNION 2 a b WEIGHTS 2 0.5 AGGREGATE MAX WITHSCORES => <"x"=2 "y"=5 "z"=10 "w"=15>
        ZUNION 2 a nothing AGGREGATE MIN => ["x" "y" "z"]
        ZINTER 2 a b WITHSCORES => <"y"=12 "z"=23>
        ZINTER 2 a s WITHSCORES => <"y"=3>
        ZINTER 3 a b b AGGREGATE MIN WITHSCORES => <"y"=2 "z"=3>
        ZINTER 2 a nothing => []
        ZDIFF 2 a b WITHSCORES => <"x"=1>
        ZDIFF 2 s a WITHSCORES => <"w"=1>
        ZDIFF 2 a b WEIGHTS 1 2 => !ERR syntax error
        ZUNIONSTORE d 2 a b => :4
        ZSCORE d z => ,23
        ZINTERSTORE a 2 a b WEIGHTS 1 -inf => :2
        ZRANGE a 0 -1 WITHSCORES => <"y"=-inf "z"=-inf>
        ZUNION 2 a a WEIGHTS 1 -1 WITHSCORES => <"y"=0 "z"=0>
        ZUNION 1 a WEIGHTS 0 WITHSCORES => <"y"=0 "z"=0>
        ZDIFFSTORE d 2 a b => :0
        EXISTS d => :0
        ZINTERCARD 2 b s => :2
        ZINTERCARD 2 b s LIMIT 1 => :1
        ZINTERCARD 2 b s LIMIT -1 => !ERR LIMIT can't be negative
        ZUNION 0 a => !ERR at least 1 input key is needed for 'zunion' command
        ZINTERSTORE d x a => !ERR value is not an integer or out of range
        ZUNION 3 a b => !ERR syntax error
        ZUNION 1 a WEIGHTS x => !ERR weight value is not a float
        ZUNION 1 a WEIGHTS => !ERR syntax error
        ZUNION 1 a AGGREGATE AVG => !ERR syntax error
        ZUNIONSTORE d 1 a WITHSCORES => !ERR syntax error
        SADD t w v => :2
        SINTERCARD 2 s t => :1
        SINTERCARD 1 s LIMIT 0 => :2
        SINTERCARD 1 s LIMIT 1 => :1
        SINTERCARD 0 s => !ERR numkeys should be greater than 0
        SINTERCARD 2 s => !ERR Number of keys can't be greater than number of args
        SINTERCARD 1 s LIMIT x => !ERR LIMIT can't be negative
        RPUSH l a => :1
        ZUNION 2 a l => !WRONGTYPE Operation against a key holding the wrong kind of value
        SINTERCARD 2 s b => !WRONGTYPE Operation against a key holding the wrong kind of value
        "#,
    );
}

#[test]
fn members_are_found_by_name() {
    Store::default().script(
        r#"
        ZADD z 0 a 0 b 0 c 0 d => :4
        ZRANGEBYLEX z - + => ["a" "b" "c" "d"]
        ZRANGEBYLEX z (a [c => ["b" "c"]
        ZRANGEBYLEX z - + LIMIT 1 2 => ["b" "c"]
        ZRANGEBYLEX z + - => []
        ZRANGEBYLEX z a c => !ERR min or max not valid string range item
        ZRANGEBYLEX z -- + => !ERR min or max not valid string range item
        ZRANGEBYLEX z - + WITHSCORES => !ERR syntax error, WITHSCORES not supported in combination with BYLEX
        ZREVRANGEBYLEX z [c - => ["c" "b" "a"]
        ZRANGE z [b (d BYLEX => ["b" "c"]
        ZRANGE z + [b BYLEX REV LIMIT 0 2 => ["d" "c"]
        ZRANGE z - + BYLEX BYSCORE => !ERR syntax error
        ZRANGE z 0 1 LIMIT 0 1 => !ERR syntax error, LIMIT is only supported in combination with either BYSCORE or BYLEX
        ZRANGE z 0 1 LIMIT 0 -1 => ["a" "b"]
        ZLEXCOUNT z (a + => :3
        ZLEXCOUNT nothing - + => :0
        ZREMRANGEBYLEX z [b (d => :2
        ZRANGE z 0 -1 => ["a" "d"]
        ZADD y 1 a 2 b 3 c => :3
        ZRANGESTORE x y 0 1 => :2
        ZRANGESTORE x y (3 1 BYSCORE REV LIMIT 0 1 => :1
        ZRANGE x 0 -1 WITHSCORES => <"b"=2>
        ZRANGESTORE y y -1 -1 => :1
        ZRANGESTORE x y 0 1 WITHSCORES => !ERR syntax error
        ZRANGESTORE x nothing 0 1 => :0
        EXISTS x y => :1
        "#,
    );
}

#[test]
fn keys_are_copied_and_described_and_bits_are_set() {
    let mut store = Store { now_ms: 1_000, ..Store::default() };
    store.script(
        r#"
        SET a 1 PX 500 => OK
        COPY a b => :1
        PTTL b => :500
        SET c 3 => OK
        COPY c b => :0
        COPY c b REPLACE => :1
        GET b => "3"
        TTL b => :-1
        COPY nothing b => :0
        COPY a a => !ERR source and destination objects are the same
        COPY a b DB 1 => !ERR COPY with DB is not supported
        COPY a b AND c => !ERR syntax error
        TOUCH a nothing a => :2
        OBJECT ENCODING a => "int"
        SET a words => OK
        OBJECT encoding a => "embstr"
        RPUSH l a => :1
        OBJECT ENCODING l => "quicklist"
        SADD s 1 2 => :2
        OBJECT ENCODING s => "intset"
        OBJECT REFCOUNT s => :1
        OBJECT REFCOUNT nothing => nil
        OBJECT FREQ nothing => nil
        OBJECT AGE a => !ERR unknown subcommand 'AGE'. Try OBJECT HELP.
        OBJECT ENCODING => !ERR wrong number of arguments for 'object|encoding' command
        SETBIT bits 7 1 => :0
        SETBIT bits 7 1 => :1
        SETBIT bits 9 0 => :0
        GET bits => "\x01\x00"
        GETBIT bits 7 => :1
        GETBIT bits 4294967295 => :0
        GETBIT bits 4294967296 => !ERR bit offset is not an integer or out of range
        SETBIT bits -1 1 => !ERR bit offset is not an integer or out of range
        SETBIT bits 1 2 => !ERR bit is not an integer or out of range
        SET text foobar => OK
        BITCOUNT text => :26
        BITCOUNT text 1 1 => :6
        BITCOUNT text 5 30 BIT => :17
        BITCOUNT text 1 -1 BYTES => !ERR syntax error
        BITCOUNT text 1 => !ERR syntax error
        BITCOUNT nothing => :0
        BITCOUNT nothing x => :0
        BITCOUNT l => !WRONGTYPE Operation against a key holding the wrong kind of value
        "#,
    );
    let long = store.run("SETBIT bits 9999999 1");
    assert!(long.starts_with("!ERR the value of one key"), "{long}");
    for aspect in ["FREQ", "IDLETIME"] {
        assert!(store.run(&format!("OBJECT {aspect} a")).starts_with("!ERR "), "{aspect}");
    }
    store.values.insert(Bytes::from("foreign"), Value::from("by another client"));
    let wrong = "!WRONGTYPE Operation against a key holding the wrong kind of value";
    assert_eq!(store.run("COPY foreign b REPLACE"), wrong);
    assert_eq!(store.run("COPY b foreign"), ":0");
    assert_eq!(store.run("OBJECT ENCODING foreign"), wrong);
}

#[test]
fn some_elements_are_answered_instead_of_random_ones() {
    let mut store = Store::default();
    store.script(
        r#"
        SADD s only => :1
        SRANDMEMBER s => "only"
        SRANDMEMBER s 0 => []
        SRANDMEMBER s 5 => ["only"]
        SRANDMEMBER s -3 => ["only" "only" "only"]
        SRANDMEMBER nothing => nil
        SRANDMEMBER nothing 2 => []
        SRANDMEMBER s x => !ERR value is not an integer or out of range
        SRANDMEMBER s -9223372036854775808 => !ERR value is out of range, value must between -9223372036854775807 and 9223372036854775807
        SRANDMEMBER s 1 2 => !ERR syntax error
        HSET h f v => :1
        HRANDFIELD h => "f"
        HRANDFIELD h 2 WITHVALUES => <"f"="v">
        HRANDFIELD h -2 => ["f" "f"]
        HRANDFIELD h 2 WITHSCORES => !ERR syntax error
        HRANDFIELD h -9223372036854775807 WITHVALUES => !ERR value is out of range
        ZADD z 1.5 m => :1
        ZRANDMEMBER z => "m"
        ZRANDMEMBER z -2 WITHSCORES => <"m"=1.5 "m"=1.5>
        ZRANDMEMBER s => !WRONGTYPE Operation against a key holding the wrong kind of value
        "#,
    );
    store.run("SADD many a b c d e f g h");
    let mut seen: Vec<String> = (0..200).map(|_| store.run("SRANDMEMBER many")).collect();
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), 8, "transactions choose each member");
}

#[test]
fn keys_expire_once_and_never_come_back() {
    let mut store = Store { now_ms: 1_000, ..Store::default() };
    store.script(
        r#"
        SET a 1 PX 500 => OK
        PTTL a => :500
        TTL a => :1
        PEXPIRETIME a => :1500
        SET b 1 => OK
        TTL b => :-1
        TTL nothing => :-2
        EXPIRE b 10 => :1
        EXPIRE b 20 NX => :0
        EXPIRE b 5 GT => :0
        EXPIRE b 20 GT => :1
        EXPIRE b 30 XX GT => :1
        EXPIRE b 20 GT XX => :0
        EXPIRE b 20 XX LT => :1
        EXPIRE b 20 NX XX => !ERR NX and XX, GT or LT options at the same time are not compatible
        EXPIRE b 20 LT NX => !ERR NX and XX, GT or LT options at the same time are not compatible
        EXPIRE b 20 GT LT => !ERR GT and LT options at the same time are not compatible
        EXPIRE b x foo => !ERR Unsupported option foo
        EXPIRE b x XX => !ERR value is not an integer or out of range
        SET forever 1 => OK
        EXPIRE forever 20 XX LT => :0
        EXPIRE forever 20 GT => :0
        EXPIRE forever 20 LT LT => :1
        PEXPIREAT forever 33177117420999 => :1
        EXPIRETIME forever => :33177117421
        PEXPIRETIME forever => :33177117420999
        TTL b => :20
        PERSIST b => :1
        PERSIST b => :0
        EXPIRE nothing 10 => :0
        SET b 2 EX 1 => OK
        INCR b => :3
        PTTL b => :1000
        SET b 4 KEEPTTL => OK
        PTTL b => :1000
        SET b 5 => OK
        TTL b => :-1
        SETEX c 10 v => OK
        GETEX c PERSIST => "v"
        TTL c => :-1
        GETEX c PX 100 => "v"
        PTTL c => :100
        EXPIRE c -1 => :1
        EXISTS c => :0
        SET a 1 EX 0 => !ERR invalid expire time in 'set' command
        SETEX a -1 v => !ERR invalid expire time in 'setex' command
        SETEX a 9223372036854775 v => !ERR invalid expire time in 'setex' command
        PEXPIRE b 9223372036854775807 => !ERR invalid expire time in 'pexpire' command
        SET d 1 PXAT 900 => OK
        EXISTS d => :0
        "#,
    );
    store.now_ms = 1_499;
    assert_eq!(store.run("GET a"), "\"1\"");
    store.now_ms = 1_500;
    // A read that finds the key expired removes it.
    assert_eq!(store.run("GET a"), "nil");
    assert!(!store.values.contains_key(&Bytes::from("a")));
    // So a gateway whose clock is behind does not see it again.
    store.now_ms = 1_400;
    assert_eq!(store.run("GET a"), "nil");
    // A transaction that only reads an expired key, and writes another, removes it, too.
    store.run("SET a 1 PX 100");
    store.now_ms = 2_000;
    let (names, commands) = Store::parse(&["EXISTS a", "SET other 1"]);
    let found = store.batch(&names, commands, &[]).unwrap();
    assert_eq!(found.replies, [Reply::Integer(0), Reply::OK]);
    assert!(!store.values.contains_key(&Bytes::from("a")));
}

#[test]
fn watched_keys_must_have_their_stamps() {
    let mut store = Store::default();
    let stamp = |store: &mut Store, name: &str| {
        let (names, commands) = Store::parse(&[&format!("GET {name}")]);
        store.batch(&names, commands, &[]).unwrap().stamps[0]
    };
    let set_b = |store: &mut Store, stamp| {
        let (mut names, commands) = Store::parse(&["SET b 1", "GET a"]);
        let watched = names.number(&Bytes::from("a"), LIMITS).unwrap();
        store.batch(&names, commands, &[(watched, stamp)]).map(|found| found.replies)
    };
    assert_eq!(stamp(&mut store, "a"), None);
    store.run("SET a 1");
    assert_eq!(set_b(&mut store, None), Err(Aborted), "the key exists now");
    assert_eq!(store.run("GET b"), "nil");
    let first = stamp(&mut store, "a");
    store.run("SET a 2");
    store.run("SET a 1");
    assert_eq!(set_b(&mut store, first), Err(Aborted), "the same value, another stamp");
    let second = stamp(&mut store, "a");
    store.run("SETNX a 5");
    store.run("HGET a 5");
    assert_eq!(set_b(&mut store, second).unwrap(), [Reply::OK, Reply::Bulk("1".into())]);
    // A batch that only reads compares, too.
    let (names, commands) = Store::parse(&["GET a"]);
    assert_eq!(store.batch(&names, commands, &[(0, first)]), Err(Aborted));
}

#[test]
fn a_list_of_one_element_that_is_rotated_keeps_its_lifetime() {
    let mut store = Store::default();
    store.script(
        r#"
        RPUSH l a => :1
        PEXPIRE l 5000 => :1
        LMOVE l l LEFT RIGHT => "a"
        PTTL l => :5000
        RPOPLPUSH l l => "a"
        LMOVE l l LEFT LEFT => "a"
        PTTL l => :5000
        RPUSH l b c => :3
        LMOVE l l LEFT RIGHT => "a"
        LRANGE l 0 -1 => ["b" "c" "a"]
        RPOPLPUSH l l => "a"
        LMOVE l l RIGHT RIGHT => "c"
        LRANGE l 0 -1 => ["a" "b" "c"]
        PTTL l => :5000
        "#,
    );
    // The element still counts once.
    let entry = entry::Entry::decode(&store.values[&Bytes::from("l")]).unwrap();
    assert_eq!(entry.content.cost(), 3 * 17);
}

#[test]
fn a_watched_key_that_is_made_and_removed_has_changed() {
    let mut store = Store::default();
    let watch = |store: &mut Store| {
        let mut names = KeyNames::default();
        let key = names.number(&"a".into(), LIMITS).unwrap();
        let found = store.batch(&names, vec![Command::Mark(vec![key])], &[]).unwrap();
        found.stamps[0].unwrap_or(Stamp { client: 7, counter: store.counter })
    };
    let exec = |store: &mut Store, stamp| {
        let (mut names, commands) = Store::parse(&["GET b"]);
        let watched = names.number(&"a".into(), LIMITS).unwrap();
        store.batch(&names, commands, &[(watched, Some(stamp))]).map(|_| ())
    };
    let first = watch(&mut store);
    assert_eq!(exec(&mut store, first), Ok(()));
    assert_eq!(watch(&mut store), first, "another client watches it, too");
    // The note is no value.
    store.script(
        r"
        EXISTS a => :0
        GET a => nil
        TYPE a => none
        TTL a => :-2
        DEL a => :0
        EXPIRE a 10 => :0
        RENAME a b => !ERR no such key
        LPUSHX a 1 => :0
        ",
    );
    assert_eq!(exec(&mut store, first), Ok(()));
    store.run("SET a 1");
    assert_eq!(exec(&mut store, first), Err(Aborted));
    store.run("DEL a");
    assert_eq!(exec(&mut store, first), Err(Aborted), "made and removed");
    assert!(store.values.is_empty());
    // In one transaction, too.
    let second = watch(&mut store);
    let (names, commands) = Store::parse(&["LPUSH a 1", "LPOP a"]);
    store.batch(&names, commands, &[]).unwrap();
    assert_eq!(exec(&mut store, second), Err(Aborted));
    // What nobody needs any more goes away when somebody looks.
    let third = watch(&mut store);
    store.now_ms += MARK_MS;
    assert_eq!(exec(&mut store, third), Err(Aborted));
    assert_eq!(store.run("GET a"), "nil");
    assert!(store.values.is_empty());
}

#[test]
fn a_key_that_is_replaced_is_not_read() {
    let uses = |lines: &[&str]| {
        let (names, commands) = Store::parse(lines);
        let batch = Batch::new(names.names().len(), commands, Vec::new(), false);
        batch.keys.iter().map(|access| (access.reads, access.writes)).collect::<Vec<_>>()
    };
    assert_eq!(uses(&["SET a 1"]), [(false, true)]);
    assert_eq!(uses(&["MSET a 1 b 2", "GET a"]), [(false, true), (false, true)]);
    assert_eq!(uses(&["GET a", "SET a 1"]), [(true, true)]);
    assert_eq!(uses(&["SET a 1 KEEPTTL"]), [(true, true)]);
    assert_eq!(uses(&["SET a 1 GET"]), [(true, true)]);
    assert_eq!(uses(&["GET a", "INCR b"]), [(true, false), (true, true)]);
}

#[test]
fn a_value_that_would_be_too_large_is_refused() {
    let mut store = Store::default();
    let long = "x".repeat(1 << 19);
    assert_eq!(store.run(&format!("APPEND a {long}")), ":524288");
    assert!(store.run(&format!("APPEND a {long}")).starts_with("!ERR the value of one key"));
    assert_eq!(store.run("STRLEN a"), ":524288");
    let longer = "x".repeat((1 << 20) - 1_024);
    assert!(store.run(&format!("SET a {longer}")).starts_with("!ERR the value of one key"));
    for command in ["HSET h f", "SADD s", "LPUSH l", "ZADD z 1"] {
        assert_eq!(store.run(&format!("{command} {long}")), ":1", "{command}");
        let more = if command == "SADD s" || command == "ZADD z 1" { "y" } else { "" };
        let refused = store.run(&format!(
            "{command}{} {long}{more}",
            if command == "HSET h f" { "2" } else { "" }
        ));
        assert!(refused.starts_with("!ERR the value of one key"), "{command}: {refused}");
    }
    assert!(store.run("SETRANGE b 9999999 x").starts_with("!ERR the value of one key"));
    let other = "z".repeat(1 << 19);
    let refused = store.run(&format!("LINSERT l AFTER {long} {other}"));
    assert!(refused.starts_with("!ERR the value of one key"), "{refused}");
    assert_eq!(store.run(&format!("SADD other {other}")), ":1");
    let refused = store.run("ZUNIONSTORE union 2 z other");
    assert!(refused.starts_with("!ERR the value of one key"), "{refused}");
    assert_eq!(store.run("EXISTS union"), ":0");
    // What is there can be removed again.
    assert_eq!(store.run("LPOP l").len(), (1 << 19) + 2);
}

#[test]
fn the_work_of_a_transaction_is_bounded() {
    let mut store = Store::default();
    let members: Vec<String> = (0..40_000).map(|number| format!("{number:06}")).collect();
    store.run(&format!("SADD s {}", members.join(" ")));
    store.run(&format!("RPUSH l {}", members.join(" ")));
    store.run(&format!("ZADD z 1 {}", members.join(" 1 ")));
    store.run(&format!("HSET h {} 1", members.join(" 1 ")));
    let size = 40_000 * (6 + 16);
    let most = WORK_BYTES_MAX / size;
    let run = |store: &Store, lines: &[&str]| {
        let (names, commands) = Store::parse(lines);
        let batch = Batch::new(names.names().len(), commands, Vec::new(), false);
        let value = |key: usize| store.values.get(&names.names()[key].1).cloned();
        let found = batch.evaluate(value, BYTES_MAX);
        assert_eq!(found.replies.is_empty(), found.is_too_large);
        if !batch.is_read_only() {
            let call = batch.call(&keys_of(&names));
            let reads: Vec<_> =
                call.reads.iter().map(|key| store.values.get(key.bytes()).cloned()).collect();
            let ran = call.run(&reads);
            assert_eq!(ran.is_err(), found.is_too_large, "replicas count as gateways do");
            assert!(ran.is_ok() || ran == Err(AbortReason::TooLarge));
        }
        !found.is_too_large
    };
    for line in [
        "SUNION s",
        "ZRANK z 000007",
        "ZCOUNT z 0 1",
        "SMEMBERS s",
        "SPOP s 0",
        "LREM l 1 x",
        "LPOS l x",
        "LINSERT l BEFORE x y",
        "SRANDMEMBER s",
        "ZRANDMEMBER z",
        "SINTERCARD 1 s LIMIT 1",
        "ZLEXCOUNT z - +",
        "OBJECT ENCODING s",
        "COPY s s2",
    ] {
        assert!(run(&store, &vec![line; most]), "{line}");
        assert!(!run(&store, &vec![line; most + 1]), "{line}");
        let changes = [vec!["INCR n"], vec![line; most + 1]].concat();
        assert!(!run(&store, &changes), "{line}");
    }
    // A member that is added makes the order a new one.
    let pairs = |rounds: usize| ["ZADD z 2 new", "ZREM z new", "ZRANGE z 0 0"].repeat(rounds);
    assert!(run(&store, &pairs(most - 1)));
    assert!(!run(&store, &pairs(most + 1)));
    assert!(run(&store, &vec!["ZRANGE z 0 9"; 1_000]), "a range of ranks is found in the order");
    assert!(!run(&store, &vec!["ZRANGEBYSCORE z 0 1"; most]), "a range of scores is not");
    for line in ["SRANDMEMBER s -2000000", "ZRANDMEMBER z -2000000", "HRANDFIELD h -2000000"] {
        assert!(!run(&store, &[line]), "{line}");
    }
    assert!(!run(&store, &vec!["ZUNION 1 z"; most / 2 + 1]));
    assert!(!run(&store, &vec!["ZRANGESTORE d z 0 1"; most]));
    assert!(!run(&store, &vec!["ZMPOP 2 z s MIN"; most]));
    // Several keys count together.
    assert!(!run(&store, &vec!["SUNIONSTORE d s s s"; most / 3 + 1]));
    // What finds its elements by name, and short parts of lists, are little work.
    for line in
        ["HSET h 000007 2", "SADD s 000007", "LRANGE l -10 -1", "LPUSH l x", "HGET h 000009"]
    {
        assert!(run(&store, &vec![line; 1_000]), "{line}");
    }
}

#[test]
fn answers_beyond_the_bound_are_left_out() {
    let mut store = Store::default();
    store.run(&format!("SET a {}", "x".repeat(1_000)));
    let (names, commands) = Store::parse(&["GET a", "GET a", "EXISTS a"]);
    let batch = Batch::new(1, commands, Vec::new(), false);
    let value = |_| store.values.get(&names.names()[0].1).cloned();
    let replies = batch.evaluate(value, 1_500).replies;
    assert!(matches!(replies[0], Reply::Bulk(_)));
    assert!(show(&replies[1]).starts_with("!ERR the answers of this transaction"));
    assert_eq!(replies.len(), 3);
}

#[test]
fn values_that_redis_commands_did_not_write_are_of_no_type() {
    let mut store = Store::default();
    store.values.insert(Bytes::from("a"), Value::from("by another client"));
    let wrong = "!WRONGTYPE Operation against a key holding the wrong kind of value";
    assert_eq!(store.run("GET a"), wrong);
    assert_eq!(store.run("TYPE a"), "foreign");
    assert_eq!(store.run("INCR a"), wrong);
    assert_eq!(store.values[&Bytes::from("a")], Value::from("by another client"));
    assert_eq!(store.run("SET a 1"), "OK");
    assert_eq!(store.run("GET a"), "\"1\"");
}

#[test]
fn a_batch_leaves_its_own_messages_in_a_channel_and_reads_nothing() {
    let mut store = Store::default();
    let published = |store: &Store, channel: &str| {
        messages::published(&store.values[&Bytes::copy_from_slice(channel.as_bytes())]).unwrap()
    };
    for round in ["1", "2"] {
        let lines = [format!("PUBLISH a x{round}"), "SPUBLISH b y".into(), "PUBLISH a z".into()];
        let (names, mut commands) = Store::parse(&lines.each_ref().map(String::as_str));
        assert_eq!(names.names()[0], (messages::CHANNELS, Bytes::from("a")));
        assert_eq!(names.names()[1], (messages::SHARD_CHANNELS, Bytes::from("b")));
        for (number, command) in (0..).zip(&mut commands) {
            let Command::Publish { place, .. } = command else { panic!("{command:?}") };
            *place = number;
        }
        let batch = Batch::new(2, commands.clone(), Vec::new(), false);
        assert!(batch.keys.iter().all(|access| access.writes && !access.reads));
        assert!(batch.call(&keys_of(&names)).reads.is_empty());
        let found = store.batch(&names, commands, &[]).unwrap();
        assert_eq!(found.replies, vec![Reply::Integer(0); 3]);
        let first = Bytes::from(format!("x{round}"));
        assert_eq!(published(&store, "a"), [(0, first), (2, "z".into())]);
        assert_eq!(published(&store, "b"), [(1, "y".into())]);
    }
    assert_eq!(messages::published(&"by another client".into()), None);
    store.run("RPUSH l x");
    assert_eq!(messages::published(&store.values[&Bytes::from("l")]), None);
}

#[test]
fn messages_of_one_batch_that_do_not_fit_are_refused_one_by_one() {
    let mut store = Store::default();
    let half = "x".repeat(entry::COST_MAX / 2 - 20);
    let line = format!("PUBLISH a {half}");
    let (names, commands) = Store::parse(&[&line, &line, "PUBLISH a x"]);
    let found = store.batch(&names, commands, &[]).unwrap();
    assert_eq!(found.replies[..2], [Reply::Integer(0), Reply::Integer(0)]);
    assert!(show(&found.replies[2]).starts_with("!ERR the messages of one transaction"));
    let value = &store.values[&Bytes::from("a")];
    assert!(value.len() <= VALUE_BYTES_MAX);
    assert_eq!(messages::published(value).unwrap().len(), 2);
    let large = format!("PUBLISH a {}", "x".repeat(entry::COST_MAX - 19));
    let refused = parse(&words(&large), &mut KeyNames::default(), LIMITS).unwrap().unwrap_err();
    assert!(!refused.is_early && refused.failure.0.contains("at most 1047552 bytes"));
}

#[test]
fn nonsense_fails_the_guard() {
    let (names, commands) = Store::parse(&["INCR a"]);
    let good = Batch::new(1, commands, Vec::new(), false);
    let keys = keys_of(&names);
    assert!(good.call(&keys).run(&[None]).is_ok());
    assert_eq!(good.call(&keys).run(&[]), Err(AbortReason::Guard));
    let mut few = good.clone();
    few.keys.clear();
    assert_eq!(few.call(&keys).run(&[]), Err(AbortReason::Guard), "a key that the batch lacks");
}

/// Whether the argument at this position is mostly a key of a command that names their number.
fn is_after_number(spec: &Spec, position: i64) -> bool {
    let is_counted = spec.name.ends_with("mpop") || spec.name.ends_with("card");
    let merges = ["zunion", "zinter", "zdiff"];
    let is_stored = spec.name.ends_with("store") && spec.name != "zrangestore";
    let is_merged = merges.iter().any(|name| spec.name.starts_with(name));
    let number = if is_merged && is_stored { 2 } else { 1 };
    spec.arity < 0 && (is_merged || is_counted) && position == number + 1
}

/// Random commands on few keys of all types.
fn random_line(rng: &mut Rng) -> String {
    let key = |rng: &mut Rng| ["a", "b", "c"][usize::try_from(rng.below(3)).unwrap()].to_owned();
    let spec = loop {
        let spec = rng.pick(COMMANDS).unwrap();
        // Messages of one batch are together in their channel, those of several batches are not.
        if !spec.name.ends_with("publish") {
            break spec;
        }
    };
    let mut line = spec.name.to_owned();
    let least = usize::try_from(spec.arity.abs()).unwrap() - 1;
    let count = least + if spec.arity < 0 { usize::try_from(rng.below(4)).unwrap() } else { 0 };
    for at in 0..count {
        let (first, last, step) = spec.keys;
        let position = i64::try_from(at).unwrap() + 1;
        if is_after_number(spec, position) {
            line.push_str(&format!(" {}", key(rng)));
            continue;
        }
        let is_key =
            position >= first && (last < 0 || position <= last) && (position - first) % step == 0;
        let word = if is_key {
            key(rng)
        } else {
            let words = ["0", "1", "-1", "2", "x", "y", "3.5", "NX", "XX", "GET", "LEFT", "RIGHT"];
            (*rng.pick(&words).unwrap()).to_owned()
        };
        line.push(' ');
        line.push_str(&word);
    }
    line
}

#[test]
fn a_batch_is_its_commands_one_after_the_other() {
    let mut ran = 0;
    for seed in 0..2_000 {
        let mut rng = Rng::stream(seed, "redis", 0);
        let (mut together, mut apart) = (Store::default(), Store::default());
        for round in 0..8 {
            (together.now_ms, apart.now_ms) = (round * 700, round * 700);
            let lines: Vec<String> = (0..1 + rng.below(5)).map(|_| random_line(&mut rng)).collect();
            let mut names = KeyNames::default();
            let parsed = lines.iter().map(|line| parse(&words(line), &mut names, LIMITS).unwrap());
            let commands: Vec<Command> = parsed.filter_map(Result::ok).collect();
            if commands.is_empty() {
                continue;
            }
            ran += commands.len();
            // All of a round have one stamp, so that both stores become equal.
            let counter = together.counter.max(apart.counter);
            let mut one_by_one = Vec::new();
            for command in &commands {
                apart.counter = counter;
                let found = apart.batch(&names, vec![command.clone()], &[]).unwrap();
                one_by_one.extend(found.replies);
            }
            together.counter = counter;
            let found = together.batch(&names, commands, &[]).unwrap();
            assert_eq!(found.replies, one_by_one, "seed {seed}: {lines:?}");
            let decoded = |store: &Store| {
                let entry = |value: &Value| {
                    let entry = entry::Entry::decode(value).unwrap();
                    (entry.content, entry.expires_ms)
                };
                store
                    .values
                    .iter()
                    .map(|(key, value)| (key.clone(), entry(value)))
                    .collect::<Vec<_>>()
            };
            assert_eq!(decoded(&together), decoded(&apart), "seed {seed}: {lines:?}");
        }
    }
    assert!(ran > 10_000, "{ran} commands ran");
}

//! Scripts with what Redis 7.0 answers to them, bounds, and equal runs.

use super::*;

const WORK: u64 = 64 << 20;

/// A host with one function: it returns its arguments.
struct Echo;

impl Host for Echo {
    fn invoke(&mut self, _: u16, vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
        Ok(Results::Many(vm.args(args, 0)))
    }
}

/// Runs a text: what it returns as a string, or its error, and the work that is left.
fn run_with(text: &str, work: u64) -> (Result<String, String>, u64) {
    let mut host = Echo;
    let Ok(mut vm) = Vm::new(work, &mut host, "user_script") else {
        return (Err("exhausted".to_owned()), 0);
    };
    let globals = vm.globals();
    let echo = vm.heap.set_field(globals, "echo", Value::Host(0));
    vm.heap.protect(globals);
    let called = echo.and_then(|()| vm.load(text.as_bytes())).and_then(|main| vm.call(main, &[]));
    let show = |vm: &Vm<'_>, value: Option<&Value>| match value {
        Some(Value::String(text)) => String::from_utf8_lossy(&vm.heap.bytes(*text)).into_owned(),
        Some(Value::Number(number)) => exact(*number),
        Some(other) => format!("{other:?}"),
        None => "nothing".to_owned(),
    };
    let shown = match called {
        Ok(values) => Ok(show(&vm, values.first())),
        Err(Stop::Error(error)) => Err(show(&vm, Some(&error))),
        Err(Stop::Exhausted) => Err("exhausted".to_owned()),
    };
    (shown, vm.heap.left())
}

fn run(text: &str) -> Result<String, String> {
    run_with(text, WORK).0
}

fn value(text: &str) -> String {
    run(text).unwrap()
}

fn error(text: &str) -> String {
    run(text).unwrap_err()
}

/// Compares line by line with what Redis answered.
fn compare(script: &str, expected: &str) {
    let found = value(&format!("return table.concat((function() {script} end)(), '\\n')"));
    for (number, (found, expected)) in found.lines().zip(expected.lines()).enumerate() {
        assert_eq!(found, expected, "line {}", number + 1);
    }
    assert_eq!(found.lines().count(), expected.trim_end().lines().count());
}

#[test]
fn the_language_and_its_library_answer_as_redis_does() {
    compare(include_str!("../testdata/language.lua"), include_str!("../testdata/language.txt"));
}

#[test]
fn errors_have_the_words_of_redis() {
    compare(include_str!("../testdata/errors.lua"), include_str!("../testdata/errors.txt"));
}

#[test]
fn pairs_follow_the_order_of_insertion() {
    let text = "local t, r = {}, {}
        local f, u = function() end, {}
        for _, k in ipairs({'z', 'a', 17, true, 1.5, -1, f, u, echo, 'm'}) do t[k] = #r end
        t[1] = 1 t.a = nil t.b = 2 t.a = 3
        for k in pairs(t) do r[#r + 1] = type(k) == 'function' and 'f' or
            type(k) == 'table' and 't' or tostring(k) end
        return table.concat(r, ' ')";
    assert_eq!(value(text), "1 z a 17 true 1.5 -1 f t f m b");
}

#[test]
fn two_runs_are_equal_to_the_last_unit_of_work() {
    let texts = [
        include_str!("../testdata/language.lua"),
        "local r = {} for i = 1, 50 do r[i] = tostring({}) .. tostring(function() end) end
         return table.concat(r)",
        "local t = {} for i = 1, 300 do t[{}] = i t[function() end] = i end
         local r = {} for k, v in pairs(t) do r[#r + 1] = tostring(k) .. v end
         return table.concat(r)",
        "return math.random() .. ' ' .. math.random(1000) .. ' ' .. math.random(5, 6)",
        "return tostring(0/0) .. tostring(-(0/0)) .. cmsgpack.pack(0/0, -(0/0))",
        "local x = 0 for i = 1, 1000 do x = x + math.sin(i) * math.exp(i / 500) ^ 1.1 end
         return string.format('%.17g', x)",
    ];
    for text in texts {
        assert_eq!(run_with(text, WORK), run_with(text, WORK), "{text}");
    }
    // These values must be the same on every processor.
    assert_eq!(value(texts[3]), "0.17082803611217 750 5");
    assert_eq!(value("return tostring(0/0) .. tostring(-(0/0))"), "nannan");
    assert_eq!(value(texts[5]), PINNED);
    assert_eq!(value("return tostring({}):match('^table: 0x0000%x+$') and 'number'"), "number");
}

const PINNED: &str = "0.019119234453874867";

#[test]
fn every_kind_of_endless_work_ends() {
    let texts = [
        "while true do end",
        "local function f() return f() end return f()",
        "local t = {} for i = 1, 1e9 do t[i] = i end",
        "local t = {} for i = 1, 1e9 do t['k' .. i] = i end",
        "local t = {} for i = 1, 1e9 do t[{}] = i end",
        "local s = 'x' while true do s = s .. s end",
        "return ('x'):rep(1e9)",
        "return ('x'):rep(1e18)",
        "return ('x'):rep(2^62):rep(2^62)",
        "return ('a'):rep(1e5):find(('a?'):rep(30) .. ('a'):rep(30) .. 'b')",
        "return ('a'):rep(1e4):find('.-.-.-.-b')",
        "return ('a'):rep(1e6):gsub('', ('b'):rep(1e5))",
        "return (('('):rep(1e5)):find('%b()%b()') or ('('):rep(1e5):gsub('%b()', '')",
        "while true do local x = pcall(error) end",
        "while true do pcall(function() while true do end end) end",
        "local s = ('a'):rep(1e6) while true do local x = s:find('b', 1, true) end",
        "local s = ('a'):rep(1e6) while true do local x = s:upper() end",
        "local s = ('a'):rep(1e6) while true do local x = s < s .. 'b' end",
        "local t = {} for i = 1, 1e5 do t[i] = 'x' end while true do table.concat(t, '--') end",
        "local t = {} for i = 1, 1e5 do t[i] = i end while true do table.remove(t, 1) t[#t+1] = 1 end",
        "local t = {} for i = 1, 1e5 do t[i] = i % 7 end while true do table.sort(t) end",
        "table.insert({}, -1e15, 1)",
        "local t = {} for i = 1, 1e5 do t[i] = i end while true do cjson.encode(t) end",
        "local s = cjson.encode({1, 2, {3}}) while true do cjson.decode(s) end",
        "local s = cmsgpack.pack({1, 2, {3}}) while true do cmsgpack.unpack(s) end",
        "while true do loadstring('return 1') end",
        "local t = setmetatable({}, {__index = function(t, k) return t[k + 1] end})
         while true do pcall(function() return t[1] end) end",
        "for i = 1, 1e300 do end",
        "local s = ('1'):rep(1e6) while true do local x = tonumber(s, 2) end",
        "local s = ('y'):rep(1e6) while true do local x = ('x'):find(s) end",
        "local s = '[' .. ('y'):rep(1e6) .. ']' while true do local x = ('x'):find(s) end",
        "local s = '[' .. ('y'):rep(1e6) while true do pcall(string.find, 'x', s) end",
        "local s = '%' .. ('-'):rep(1e6) while true do pcall(string.format, s, 1) end",
        "local s = ('%1'):rep(1e5) while true do local x = ('a'):gsub('(x*)', s) end",
        "local s = '(x*)' .. ('y'):rep(1e5) while true do local x = ('a'):gmatch(s)() end",
        "for i = 1, 1, 0 do end",
        "local t = {} for i = 1, 5000 do t[i] = 1 end while true do local x = {unpack(t)} end",
        "while true do local x = ('%99.99f'):format(1e300) end",
        "local t = {} t[1e9] = 1 while true do local x = table.maxn(t) end",
        "local t = {} while true do t.x = 1 t.x = nil t[#t + 1] = next(t) end",
    ];
    for text in texts {
        // Less work than a script has, so that the test is short.
        assert_eq!(run_with(text, WORK / 8).0, Err("exhausted".to_owned()), "{text}");
    }
}

#[test]
fn work_is_counted_before_it_is_done() {
    // With so little, nothing long may be made.
    let texts = ["return ('x'):rep(1e15)", "return ('x'):rep(1e6)", "while true do end"];
    for text in texts {
        assert_eq!(run_with(text, 60_000), (Err("exhausted".to_owned()), 0), "{text}");
    }
    assert_eq!(run_with("return 1", 100).0, Err("exhausted".to_owned()));
    let long = format!("return '{}'", "x".repeat(1_000_000));
    assert_eq!(run_with(&long, 1_000_000).0, Err("exhausted".to_owned()));
    assert_eq!(check(long.as_bytes(), "x", 1_000_000), Err(Stop::Exhausted));
    assert_eq!(check(b"return 1", "x", 1_000_000), Ok(None));
    let wrong = check(b"return return", "x", 1_000_000).unwrap().unwrap();
    assert_eq!(wrong, "x:1: unexpected symbol near 'return'");
}

#[test]
fn what_nests_too_deeply_is_an_error() {
    let nested = |open: &str, close: &str, many: usize| {
        format!("return {}1{}", open.repeat(many), close.repeat(many))
    };
    let too_many = "user_script:1: chunk has too many syntax levels";
    let overflow = "user_script:1: stack overflow";
    for (open, close) in [("(", ")"), ("{", "}"), ("- ", ""), ("not ", ""), ("2^", "")] {
        assert!(run(&nested(open, close, 60)).is_ok(), "{open}");
        assert_eq!(error(&nested(open, close, 100_000)), too_many, "{open}");
    }
    let blocks = "do ".repeat(1_000) + &"end ".repeat(1_000);
    assert_eq!(error(&blocks), too_many);
    let functions = "return function() ".repeat(1_000) + &"end ".repeat(1_000);
    assert_eq!(error(&functions), too_many);
    assert_eq!(error("local function f() return 1 + f() end return f()"), overflow);
    for text in [
        "local t = setmetatable({}, {}) getmetatable(t).__index = function(t, k) return t[k] end
         return t.x",
        "local function f(a) return (tostring(setmetatable({}, {__tostring = f}))) end return f()",
        "local function f() return (('x'):gsub('x', f)) end return f()",
    ] {
        assert!(error(text).ends_with("stack overflow"), "{}", error(text));
    }
    let deep = "local t = {} for i = 1, 1000 do t = {t} end return ";
    assert!(error(&format!("{deep} cjson.encode(t)")).contains("excessive depth"));
    assert_eq!(value(&format!("{deep} #cmsgpack.pack(t)")), "17");
    assert!(error("return cjson.decode(('['):rep(1000))").contains("too many nested"));
    assert!(error("return cmsgpack.unpack(('\\145'):rep(1000))").contains("Too many nested"));
    assert!(
        error("return ('a'):rep(300):match(('(a'):rep(31) .. ('a?'):rep(300))")
            .contains("too complex")
    );
}

/// The deepest recursion of everything at once fits into a quarter of a thread's stack.
#[test]
fn the_deepest_recursion_needs_little_of_the_stack() {
    let inner = format!("return {}1{}", "(".repeat(60), ")".repeat(60));
    let text = format!(
        "local depth = 0
         local function f()
             depth = depth + 1
             if depth < 90 then
                 local ok, e = pcall(function() return (('x'):gsub('x', f)) end)
                 return e
             end
             local t = {{}} for i = 1, 100 do t = {{t}} end
             cjson.decode(cjson.encode(t))
             ;('a'):rep(300):find(('a?'):rep(150))
             return loadstring('{inner}')() .. ''
         end
         local r = f() return tostring(r)"
    );
    let deepest = std::thread::Builder::new().stack_size(512 << 10);
    let found = deepest.spawn(move || run(&text)).unwrap().join().unwrap();
    assert!(found.is_ok(), "{found:?}");
}

#[test]
fn nothing_leads_out_of_a_script() {
    for name in [
        "io",
        "os",
        "debug",
        "require",
        "module",
        "package",
        "print",
        "dofile",
        "loadfile",
        "load",
        "collectgarbage",
        "gcinfo",
        "newproxy",
        "setfenv",
        "getfenv",
        "coroutine",
        "struct",
    ] {
        let text = format!("return {name}");
        assert!(error(&text).contains("nonexistent global variable"), "{name}");
    }
    assert_eq!(value("return type(string.dump)"), "nil");
    for text in [
        "x = 1",
        "_G.x = 1",
        "string.len = 1",
        "rawset(_G, 'x', 1)",
        "table.insert(_G, 1)",
        "getmetatable('').__index = 1",
        "setmetatable(_G, {})",
        "table.sort(math)  math.pi = 3",
        "function f() end",
    ] {
        assert!(error(text).ends_with("Attempt to modify a readonly table"), "{text}");
    }
    // The bytes of compiled code are no script.
    assert!(error("return loadstring('\\27Lua')()").contains("call a nil value"));
    assert_eq!(value("return echo('a', 'b')"), "a");
}

#[test]
fn an_error_of_an_error_handler_is_caught() {
    let text = "local function e(x) error(x) end local ok, why = xpcall(error, e) return tostring(ok)..': '..why";
    assert_eq!(value(text), "false: error in error handling");
    let text =
        "local ok, a, b = xpcall(error, function() return 1, 2 end) return tostring(ok)..a..b";
    assert_eq!(value(text), "false12");
}

#[test]
fn work_cannot_be_caught() {
    assert_eq!(error("pcall(function() while true do end end) return 1"), "exhausted");
    assert_eq!(error("return xpcall(function() return ('x'):rep(1e9) end, tostring)"), "exhausted");
}

#[test]
fn any_text_is_refused_or_runs() {
    // Pieces in any order: nothing may panic.
    let pieces = [
        "local",
        "a",
        "=",
        "1",
        "function",
        "(",
        ")",
        "end",
        "if",
        "then",
        "else",
        "for",
        "in",
        "do",
        "while",
        "repeat",
        "until",
        "return",
        "{",
        "}",
        "[",
        "]",
        "..",
        "...",
        "'x'",
        ",",
        "nil",
        "not",
        "-",
        "#",
        "a.b",
        "a:b",
        "==",
        "and",
        "or",
        "break",
        ";",
        "[[",
        "]]",
        "--",
        "\\",
        "\"",
        "0x",
        "1e",
        "%",
        "~",
        "pairs",
        "tostring",
        "\n",
        "goto",
        "string.rep",
    ];
    let mut state = 7_u64;
    for _ in 0..30_000 {
        let mut text = String::new();
        for _ in 0..12 {
            state = crate::value::mix(state.wrapping_add(0x1234_5678));
            text += pieces[(state >> 20) as usize % pieces.len()];
            text += " ";
        }
        let _ = run_with(&text, 100_000);
    }
}

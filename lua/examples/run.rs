#![allow(missing_docs)]
use orthodrome_lua::*;
struct No;
impl Host for No {
    fn invoke(&mut self, _: u16, _: &mut Vm<'_>, _: Args) -> Result<Results, Stop> {
        Ok(Results::None)
    }
}
fn main() {
    let mut text = String::new();
    std::io::Read::read_to_string(&mut std::io::stdin(), &mut text).unwrap();
    let mut host = No;
    let start = std::time::Instant::now();
    let mut vm = Vm::new(64 << 20, &mut host, "user_script").unwrap();
    let made = start.elapsed();
    let r = vm.load(text.as_bytes()).and_then(|f| vm.call(f, &[]));
    let took = start.elapsed();
    match r {
        Ok(v) => {
            for v in v {
                show(&mut vm, v)
            }
        }
        Err(Stop::Error(Value::String(s))) => {
            println!("ERR {}", String::from_utf8_lossy(&vm.heap.bytes(s)))
        }
        Err(e) => println!("{e:?}"),
    }
    if std::env::var("T").is_ok() {
        eprintln!("made {made:?} took {took:?} left {}", vm.heap.left());
    }
}
fn show(vm: &mut Vm<'_>, v: Value) {
    match v {
        Value::String(s) => println!("{}", String::from_utf8_lossy(&vm.heap.bytes(s))),
        Value::Number(n) => println!("{}", whole(n)),
        Value::Table(t) => {
            for i in 1.. {
                let v = vm.heap.element(t, i);
                if v.is_nil() {
                    break;
                }
                show(vm, v)
            }
        }
        Value::Boolean(true) => println!("1"),
        _ => println!(),
    }
}

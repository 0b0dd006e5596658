//! The golden traces of every protocol of the registry: one file, one behaviour. They are in the
//! `testdata` of the protocol's folder, in a folder for each variant; those of a variant without a
//! folder of its own are in `testdata` itself. Rewritten by `cargo xtask golden`.

use std::any::type_name;
use std::path::{Path, PathBuf};
use std::thread;

use orthodrome_core::ordered::OrdSet;

use orthodrome_protocols::registry::{self, Registered, Row, Visitor};
use orthodrome_sim::golden::run_all;

/// The folder with the golden traces of a variant of `P`.
fn folder<P: Registered>(name: &str) -> PathBuf {
    let module = type_name::<P>().split("::").nth(1).unwrap();
    let all = Path::new("src").join(module).join("testdata");
    let variant = name.split_once('-').map_or(name, |(_, variant)| variant);
    let own = [name, variant].into_iter().map(|name| all.join(name)).find(|path| path.is_dir());
    own.unwrap_or(all)
}

struct Run;

impl Visitor for Run {
    type Out = PathBuf;

    fn visit<P: Registered>(self, row: &'static Row) -> PathBuf {
        let folder = folder::<P>(row.name);
        if let Err(error) = run_all::<P>(row.name, &folder) {
            panic!("{}: {error}", row.name);
        }
        folder
    }
}

#[test]
fn golden_traces_of_every_protocol_are_as_recorded() {
    let run = |row: &'static Row| registry::with(row.name, Run).unwrap();
    let folders: Vec<PathBuf> = thread::scope(|scope| {
        let all: Vec<_> = registry::rows().map(|row| scope.spawn(move || run(row))).collect();
        all.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let distinct: OrdSet<&PathBuf> = folders.iter().collect();
    assert_eq!(distinct.len(), folders.len(), "two variants share a folder: {folders:?}");
}

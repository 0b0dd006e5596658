//! The small configurations pass, and every mutation is caught by a known shortest counterexample.

use std::fs;
use std::path::Path;

use orthodrome_model::catalogue::{CONFIGURATIONS, Configuration, Size, catches};
use orthodrome_model::mutation::Mutation;

/// One test runs all of them, one after the other: the model needs one core.
#[test]
fn small_configurations_pass_completely() {
    for it in CONFIGURATIONS.iter().filter(|it| it.size == Size::Small) {
        let report = it.check(None, None);
        if let Some((property, trace)) = &report.failure {
            panic!("{}: {property} fails:\n{trace}", it.name);
        }
        assert!(report.is_complete, "{}: not all states were seen", it.name);
        assert!(report.states > 100, "{}: {} states: is it empty?", it.name, report.states);
    }
}

/// `UPDATE_GOLDENFILES=1` writes the traces again; review the difference as code.
#[test]
fn every_mutation_is_caught_with_its_golden_counterexample() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata");
    let is_update = std::env::var_os("UPDATE_GOLDENFILES").is_some();
    let mut wrong = Vec::new();
    for &mutation in Mutation::ALL {
        let (name, expected) = catches(mutation);
        let it = Configuration::named(name).unwrap_or_else(|| panic!("no configuration {name}"));
        let Some((property, trace)) = it.check(Some(mutation), None).failure else {
            wrong.push(format!("{}: {name} finds no counterexample", mutation.name()));
            continue;
        };
        if property != expected {
            wrong.push(format!("{}: {property} fails, not {expected}", mutation.name()));
        }
        let sentence = mutation.sentence();
        let text = format!("# {sentence}\n# {name}: {property} fails.\n\n{trace}");
        let file = folder.join(format!("{}.txt", mutation.name()));
        if is_update {
            fs::write(&file, &text).unwrap();
        } else if fs::read_to_string(&file).unwrap_or_default() != text {
            wrong.push(format!("{}: another counterexample:\n{text}", mutation.name()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_golden_counterexample_has_a_mutation() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata");
    for entry in fs::read_dir(folder).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let is_known = Mutation::ALL.iter().any(|it| format!("{}.txt", it.name()) == name);
        assert!(is_known, "model/testdata/{name} belongs to no mutation");
    }
}

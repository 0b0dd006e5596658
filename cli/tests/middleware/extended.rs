//! PostgreSQL's extended protocol and MySQL's prepared statements: forms of values, portals, and
//! bounds.

use std::path::Path;
use std::process::Command;

use orthodrome_middleware::local::{PASSWORD, USER};

use crate::rig::{CLIENT, Rig, SECRET, all_of, rig, said};
use crate::tools::{class_path, python, skipped};

/// A table and a function that writes to it, at both sources.
fn make_functions(rig: &Rig) {
    let at_postgres = "\
        DROP TABLE IF EXISTS notes; CREATE TABLE notes (id int); DROP TYPE IF EXISTS mood; \
        CREATE TYPE mood AS ENUM ('mild'); \
        CREATE OR REPLACE FUNCTION note(given int) RETURNS int LANGUAGE sql AS \
            'INSERT INTO notes VALUES (given) RETURNING id'";
    said(at_postgres, rig.servers[0].login());
}

#[test]
fn drivers_use_the_extended_protocol_within_its_bounds() {
    let python = match python() {
        Ok(python) => python,
        Err(why) => return skipped(&format!("no Python with drivers could be made: {why}")),
    };
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], false);
    make_functions(rig);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/middleware/extended.py");
    let ports = [rig.postgresql.to_string(), rig.mysql.to_string()];
    let source = format!("{},{USER},{PASSWORD}", rig.servers[0].port);
    let mut command = Command::new(&python);
    command.arg(&script).args([CLIENT, SECRET]).args(ports).arg(source);
    let output = command.output().unwrap();
    let told = all_of(&output);
    assert!(output.status.success() && told.contains("ok"), "{}\n{told}", rig.log());
    // Each execution outside of the transaction that was rolled back has written once.
    rig.finish();
    assert_eq!(said("SELECT count(*) FROM notes", rig.servers[0].login()), "2");
    rig.settle("the extended protocol");
}

#[test]
fn parameters_without_a_type_get_that_of_their_place() {
    let python = match python() {
        Ok(python) => python,
        Err(why) => return skipped(&format!("no Python with drivers could be made: {why}")),
    };
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], false);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/middleware/untyped.py");
    let mut command = Command::new(&python);
    command.arg(&script).args([CLIENT, SECRET, &rig.postgresql.to_string()]);
    assert!(rig.runs(&mut command).contains("ok"));
    rig.settle("parameters without a type");
}

#[test]
fn jdbc_reads_rows_piece_by_piece() {
    let jars = match class_path() {
        Ok(jars) => jars,
        Err(why) => return skipped(&format!("no drivers for Java: {why}")),
    };
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], false);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/middleware/Portals.java");
    let address = format!("jdbc:postgresql://127.0.0.1:{}/bank", rig.postgresql);
    let mut java = Command::new("java");
    java.args(["-cp", &jars]).arg(&script).args([&address, CLIENT, SECRET]);
    assert!(rig.runs(&mut java).contains("ok"));
    rig.settle("portals");
}

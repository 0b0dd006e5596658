//! Features of the protocols besides statements: TLS and cancellation.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command, Stdio};
use std::time::Instant;

use orthodrome_core::NodeId;
use orthodrome_geotp::sql::Dialect;
use orthodrome_middleware::local::postgres_client;
use orthodrome_server::tls::Authority;

use crate::rig::{CLIENT, PATIENCE, Rig, SECRET, Setup, rig, said, wait};

impl Rig {
    pub fn psql_by(&self, settings: &str) -> Command {
        let mut command = Command::new(postgres_client("psql"));
        let place = format!("host=127.0.0.1 port={} user={CLIENT} dbname=bank", self.postgresql);
        command.args(["-X", "-At", &format!("{place} {settings}")]).env("PGPASSWORD", SECRET);
        command
    }

    /// Whether a statement waits for a lock at its source. `text` is a part of the statement.
    fn is_waiting(&self, text: &str) -> bool {
        let text = text.replace('\'', "''");
        let postgres = format!(
            "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%{text}%'"
        );
        let maria = format!(
            "SELECT 1 FROM information_schema.processlist WHERE info LIKE '%{text}%' AND id <> connection_id() \
             AND time_ms > 100"
        );
        !said(&postgres, self.servers[0].login()).is_empty()
            || !said(&maria, self.servers[1].login()).is_empty()
    }

    fn mariadb_by(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("mariadb");
        command.args(["--no-defaults", "-h", "127.0.0.1", "-P", &self.mysql.to_string()]);
        command.args(["-u", CLIENT]).args(arguments).arg("bank").env("MYSQL_PWD", SECRET);
        command
    }
}

fn output(command: &mut Command) -> (bool, String) {
    let output = command.output().unwrap();
    let of = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.success(), of(&output.stdout) + &of(&output.stderr))
}

#[test]
fn clients_of_both_kinds_talk_tls() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    let files = Authority::new("test").unwrap();
    let files = files.issue(&rig.path(""), NodeId(1), &["127.0.0.1".to_owned()]).unwrap();
    let mut setup = Setup::accounts(&[0, 1], false);
    setup.settings = "[tls]\ncertificate = \"n1.pem\"\nkey = \"n1.key\"\n".into();
    rig.start(setup);
    let authority = files.authority.display().to_string();
    let verified = format!("sslmode=verify-full sslrootcert={authority}");
    for mode in ["sslmode=require", &verified] {
        let (is_good, said) =
            output(rig.psql_by(mode).args(["-c", "\\conninfo", "-c", "SELECT 1"]));
        assert!(is_good && said.contains("SSL connection (protocol: TLSv1."), "{mode}: {said}");
    }
    let (is_good, said) = output(rig.psql_by("sslmode=disable").args(["-c", "\\conninfo"]));
    assert!(is_good && !said.contains("SSL connection"), "{said}");
    let verified = format!("--ssl-ca={authority}");
    for arguments in [&["--ssl"][..], &[&verified, "--ssl-verify-server-cert"]] {
        let (is_good, said) = output(rig.mariadb_by(arguments).args(["-e", "\\s"]));
        assert!(is_good && said.contains("Cipher in use is TLS_"), "{arguments:?}: {said}");
    }
    // A client that does not trust the authority does not connect.
    let other = Authority::new("test").unwrap();
    std::fs::create_dir_all(rig.path("other")).unwrap();
    let other = other.issue(&rig.path("other"), NodeId(1), &[]).unwrap();
    let mode = format!("sslmode=verify-full sslrootcert={}", other.authority.display());
    assert!(!output(rig.psql_by(&mode).args(["-c", "SELECT 1"])).0);
}

/// A proxy without a certificate refuses TLS, and no password is sent without encryption instead.
#[test]
fn tls_is_refused_where_there_is_no_certificate() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start(Setup::accounts(&[0, 1], false));
    let (is_good, said) = output(rig.psql_by("sslmode=require").args(["-c", "SELECT 1"]));
    assert!(!is_good && said.contains("server does not support SSL"), "{said}");
    let (is_good, said) =
        output(rig.mariadb_by(&["--ssl", "--ssl-verify-server-cert"]).args(["-e", "SELECT 1"]));
    assert!(!is_good && said.contains("SSL"), "{said}");
}

#[test]
fn a_statement_that_waits_is_cancelled_from_both_kinds_of_clients() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    // Longer than any wait of the test.
    rig.start_bank_as(Setup {
        lock_wait_ms: 2 * PATIENCE.as_millis() as u32,
        ..Setup::accounts(&[0, 1], false)
    });
    // Another transaction locks a row at each source.
    let mut holder = rig.psql_by("");
    let mut holder = holder.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut says = holder.stdin.take().unwrap();
    let mut hears = BufReader::new(holder.stdout.take().unwrap());
    says.write_all(b"BEGIN; UPDATE accounts SET balance = balance WHERE id IN (1, 101);\n")
        .unwrap();
    says.flush().unwrap();
    let mut line = String::new();
    while !line.contains("UPDATE") {
        line.clear();
        assert!(hears.read_line(&mut line).unwrap() > 0, "{}", rig.log());
    }
    for (account, source) in [(1, "PostgreSQL"), (101, "MariaDB")] {
        let text = format!("UPDATE accounts SET balance = 0 WHERE id = {account}");
        for kind in [Dialect::PostgreSql, Dialect::MariaDb] {
            let mut client = rig.login(kind).client(&text);
            let client = client.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            let waits = wait(Instant::now() + PATIENCE, || rig.is_waiting(&text));
            waits.unwrap_or_else(|| panic!("{}\n{text}: {kind} does not wait", rig.log()));
            let begun = Instant::now();
            let pid = client.id().to_string();
            assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
            let output = client.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(begun.elapsed() < PATIENCE, "{kind} at {source}: {said}");
            assert!(!output.status.success(), "{kind} at {source}");
            assert!(
                said.contains("user request") || said.contains("1317"),
                "{kind} at {source}: {said}"
            );
        }
    }
    says.write_all(b"ROLLBACK;\n").unwrap();
    drop(says);
    assert!(holder.wait().unwrap().success());
    rig.settle("cancelled statements");
}

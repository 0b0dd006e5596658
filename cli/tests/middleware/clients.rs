//! Clients that do not know of the proxy: benchmarks of both kinds, SQLAlchemy and JDBC.

use std::path::Path;
use std::process::{Command, Output};
use std::time::Instant;

use orthodrome_middleware::local::postgres_client;

use crate::rig::{CLIENT, PATIENCE, Rig, SECRET, Setup, rig, said, wait};
use crate::tools::{class_path, is_here, python, skipped};

fn text(output: &Output) -> String {
    let of = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    of(&output.stdout) + &of(&output.stderr)
}

/// How long the statements of client programs may wait for locks. On a busy machine the last of eight
/// clients waits for seconds, and so does a table that is dropped while a commit that was told is still
/// on its way to the sources.
const PATIENT_MS: u32 = 30_000;

impl Rig {
    /// Runs a command that must succeed, and returns its output.
    pub fn runs(&self, command: &mut Command) -> String {
        let output = command.output().unwrap();
        let said = text(&output);
        assert!(output.status.success(), "{}\n{command:?}: {said}", self.log());
        said
    }

    /// Tables whose rows are sharded over all servers by the hash of a column.
    fn start_hashed(&mut self, tables: &[(&str, &str)]) {
        for server in &self.servers {
            for (table, _) in tables {
                said(&format!("DROP TABLE IF EXISTS {table}"), server.login());
            }
        }
        let shard = |(table, column): &(&str, &str)| {
            format!(
                "[[tables]]\nname = \"{table}\"\nshard = {{ by = \"hash\", column = \"{column}\", \
                 sources = [\"s0\", \"s1\", \"s2\", \"s3\"] }}\n"
            )
        };
        self.start(Setup {
            tables: tables.iter().map(shard).collect(),
            lock_wait_ms: PATIENT_MS,
            ..Setup::accounts(&[0, 1, 2, 3], false)
        });
    }

    fn pgbench(&self) -> Command {
        let mut command = Command::new(postgres_client("pgbench"));
        command.args(["-h", "127.0.0.1", "-p", &self.postgresql.to_string(), "-U", CLIENT]);
        command.env("PGPASSWORD", SECRET).env("PGDATABASE", "bank");
        command
    }
}

/// The number before a word, or after it.
fn figure(said: &str, after: &str) -> u64 {
    let rest = said.split(after).nth(1).unwrap_or_else(|| panic!("{after}: {said}"));
    let digits: String = rest.trim_start().chars().take_while(|c| c.is_ascii_digit()).collect();
    digits.parse().unwrap_or_else(|_| panic!("{after}: {said}"))
}

#[test]
fn pgbench_makes_its_own_tables_over_all_sources_and_runs() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_hashed(&[
        ("pgbench_accounts", "aid"),
        ("pgbench_branches", "bid"),
        ("pgbench_tellers", "tid"),
        ("pgbench_history", "aid"),
    ]);
    rig.runs(rig.pgbench().args(["-i", "-s", "1"]));
    assert_eq!(
        rig.psql("SELECT count(*), min(aid), max(aid) FROM pgbench_accounts"),
        "100000|1|100000"
    );
    for server in &rig.servers {
        let own: u64 =
            said("SELECT count(*) FROM pgbench_accounts", server.login()).parse().unwrap();
        assert!(
            (20_000..30_000).contains(&own),
            "{own} of 100000 accounts are at one of four sources"
        );
    }
    for protocol in ["simple", "prepared"] {
        let said =
            rig.runs(rig.pgbench().args(["-c", "2", "-t", "15", "--max-tries=50", "-M", protocol]));
        assert!(figure(&said, "transactions actually processed: ") > 20, "{said}");
    }
    let sums = "SELECT sum(abalance) FROM pgbench_accounts; SELECT sum(tbalance) FROM pgbench_tellers; \
                SELECT sum(bbalance) FROM pgbench_branches; SELECT sum(delta) FROM pgbench_history";
    let sums = rig.psql(sums);
    let sums: Vec<&str> = sums.lines().collect();
    // The second run began with an empty history.
    assert!(sums[0] == sums[1] && sums[1] == sums[2], "{sums:?}");
    assert_eq!(rig.psql("COPY pgbench_branches (bid, filler) FROM STDIN"), "");
    // The next test may have fewer sources.
    rig.finish();
}

#[test]
fn sysbench_prepares_runs_and_cleans_up() {
    if !is_here("sysbench", "--version") {
        return skipped("sysbench is not installed: apt-get install sysbench");
    }
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    // Where the client numbers rows, and where the proxy does.
    for auto_inc in ["--auto_inc=off", "--auto_inc=on"] {
        sysbench_runs(rig, auto_inc);
    }
}

fn sysbench_runs(rig: &mut Rig, auto_inc: &str) {
    rig.start_hashed(&[("sbtest1", "id"), ("sbtest2", "id")]);
    let sysbench = |order: &str| {
        let mut command = Command::new("sysbench");
        command.args(["oltp_read_write", "--db-driver=mysql", "--mysql-host=127.0.0.1"]);
        command.arg(format!("--mysql-port={}", rig.mysql));
        command.args([&format!("--mysql-user={CLIENT}"), &format!("--mysql-password={SECRET}")]);
        command.args(["--mysql-db=bank", "--tables=2", "--table-size=10000", auto_inc]);
        command.args(["--threads=2", "--time=0", "--events=20", order]);
        command
    };
    // The errors of a transaction that lost a conflict: sysbench begins another one.
    let ignore = "--mysql-ignore-errors=1213,1205,1020";
    rig.runs(&mut sysbench("prepare"));
    assert_eq!(rig.mysql("SELECT count(*) FROM sbtest1"), "10000");
    let said = rig.runs(sysbench("run").arg(ignore));
    assert!(figure(&said, "transactions:") > 5, "{said}");
    // A transaction deletes a row and inserts it again.
    assert_eq!(rig.mysql("SELECT count(*), min(id), max(id) FROM sbtest2"), "10000\t1\t10000");
    rig.runs(&mut sysbench("cleanup"));
    let gone =
        rig.login(orthodrome_geotp::sql::Dialect::MariaDb).client("SELECT 1 FROM sbtest1").output();
    assert!(text(&gone.unwrap()).contains("1146"));
    // The next test may have fewer sources.
    rig.finish();
}

#[test]
fn sqlalchemy_moves_money_in_both_protocols() {
    let python = match python() {
        Ok(python) => python,
        Err(why) => return skipped(&format!("no Python with SQLAlchemy could be made: {why}")),
    };
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], false);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/middleware/transfer.py");
    for (driver, port) in [("postgresql+psycopg2", rig.postgresql), ("mysql+pymysql", rig.mysql)] {
        let address = format!("{driver}://{CLIENT}:{SECRET}@127.0.0.1:{port}/bank");
        let said = rig.runs(Command::new(&python).arg(&script).arg(address));
        assert!(said.contains("ok "), "{said}");
        rig.settle(driver);
    }
}

impl Rig {
    /// No table has a place: clients create them.
    fn start_empty(&mut self, servers: &[usize]) {
        let setup = Setup::accounts(servers, false);
        self.start(Setup { tables: String::new(), lock_wait_ms: PATIENT_MS, ..setup });
        // Until then the first statement of a client may be told that a source cannot be reached.
        let are_connected = || {
            let log = std::fs::read_to_string(self.path("proxy.log")).unwrap_or_default();
            log.matches("connected source=").count() >= servers.len()
        };
        let connected = wait(Instant::now() + PATIENCE, are_connected);
        connected.unwrap_or_else(|| panic!("{}\nthe proxy reaches no source", self.log()));
    }
}

#[test]
fn sqlalchemy_s_core_and_orm_run_with_a_schema_of_their_own() {
    let python = match python() {
        Ok(python) => python,
        Err(why) => return skipped(&format!("no Python with SQLAlchemy could be made: {why}")),
    };
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_empty(&[0, 1]);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/middleware/orm.py");
    for (driver, port) in [
        ("postgresql+psycopg2", rig.postgresql),
        ("postgresql+psycopg", rig.postgresql),
        ("mysql+pymysql", rig.mysql),
    ] {
        let address = format!("{driver}://{CLIENT}:{SECRET}@127.0.0.1:{port}/bank");
        let said = rig.runs(Command::new(&python).arg(&script).arg(address));
        assert!(said.contains("ok "), "{said}");
    }
}

/// Frameworks write many rows as one query over constants, here with keys that the proxy generates.
#[test]
fn rows_that_sqlalchemy_inserts_together_go_where_they_live() {
    const SCRIPT: &str = "\
import sys
from sqlalchemy import String, create_engine, func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
class Base(DeclarativeBase):
    pass
class Tag(Base):
    __tablename__ = 'tags'
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(20))
engine = create_engine(sys.argv[1])
Base.metadata.drop_all(engine)
with engine.connect().execution_options(isolation_level='AUTOCOMMIT') as connection:
    Base.metadata.create_all(connection)
with Session(engine) as session, session.begin():
    tags = [Tag(name=f'tag {n}') for n in range(60)]
    session.add_all(tags)
    session.flush()
    assert [session.scalar(select(Tag.name).where(Tag.id == tag.id)) for tag in tags] == [tag.name for tag in tags]
with Session(engine) as session:
    assert session.scalar(select(func.count()).select_from(Tag)) == 60
print('ok')";
    let python = match python() {
        Ok(python) => python,
        Err(why) => return skipped(&format!("no Python with SQLAlchemy could be made: {why}")),
    };
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    for driver in ["postgresql+psycopg2", "postgresql+psycopg"] {
        rig.start_hashed(&[("tags", "id")]);
        let address = format!("{driver}://{CLIENT}:{SECRET}@127.0.0.1:{}/bank", rig.postgresql);
        let said = rig.runs(Command::new(&python).args(["-c", SCRIPT]).arg(address));
        assert!(said.contains("ok"), "{said}");
    }
}

#[test]
fn django_s_transactions_nest_in_both_protocols() {
    let python = match python() {
        Ok(python) => python,
        Err(why) => return skipped(&format!("no Python with Django could be made: {why}")),
    };
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_empty(&[0, 1]);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/middleware/django_app.py");
    for (engine, port) in [("postgresql", rig.postgresql), ("mysql", rig.mysql)] {
        let mut app = Command::new(&python);
        app.arg(&script).args([engine, &port.to_string(), CLIENT, SECRET]);
        let said = rig.runs(&mut app);
        assert!(said.contains("ok "), "{said}");
    }
}

/// `pgbench -i` creates its own tables, without a word about them in the proxy's file, and runs its default script.
#[test]
fn pgbench_runs_on_tables_that_nobody_has_placed() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    for server in &rig.servers {
        for table in ["accounts", "branches", "tellers", "history"] {
            said(&format!("DROP TABLE IF EXISTS pgbench_{table}"), server.login());
        }
    }
    // Every transaction changes the only branch, and pgbench does not try again after a lock time-out.
    // Nothing is fair about who wins: beside a load of 12, one of eight clients lost a hundred times.
    rig.start_empty(&[0, 1]);
    rig.runs(rig.pgbench().args(["-i", "-s", "1"]));
    for clients in ["4", "8"] {
        let run = ["-c", clients, "-t", "20", "--max-tries=2000", "--verbose-errors"];
        let said = rig.runs(rig.pgbench().args(run));
        let wanted = clients.parse::<u64>().unwrap() * 20;
        let processed = figure(&said, "transactions actually processed: ");
        assert_eq!(processed, wanted, "{said}\n{}", rig.log());
    }
}

/// What `psql` sends for its own commands.
#[test]
fn psql_describes_tables_and_databases() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], false);
    let tables = rig.psql(r"\dt");
    // The user of the sources owns them.
    assert!(tables.contains("accounts") && !tables.contains("orthodrome_"), "{tables}");
    let table = rig.psql(r"\d accounts");
    assert!(table.contains("id|integer") && table.contains("balance|integer"), "{table}");
    assert!(rig.psql(r"\l").contains("bank"));
    let refused = rig.try_psql("LISTEN jobs");
    assert!(text(&refused).contains("LISTEN is not supported"), "{}", text(&refused));
}

#[test]
fn jdbc_moves_money_in_both_protocols() {
    let jars = match class_path() {
        Ok(jars) => jars,
        Err(why) => return skipped(&format!("no drivers for Java: {why}")),
    };
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], false);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/middleware/Transfer.java");
    for address in [
        format!("jdbc:postgresql://127.0.0.1:{}/bank", rig.postgresql),
        format!("jdbc:mariadb://127.0.0.1:{}/bank", rig.mysql),
    ] {
        let mut java = Command::new("java");
        java.args(["-cp", &jars]).arg(&script).args([&address, CLIENT, SECRET]);
        let said = rig.runs(&mut java);
        assert!(said.contains("ok 40 40000"), "{said}");
        rig.settle(&address);
    }
}

/// Quotes and backslashes reach sources of both kinds with the client's meaning.
#[test]
fn texts_with_quotes_and_backslashes_stay_what_they_are() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], false);
    for id in [1, 101] {
        let seen =
            rig.psql(&format!(r"SELECT 'a\'', ''''b', balance FROM accounts WHERE id = {id}"));
        assert_eq!(seen, r"a\', ''b|1000", "{id}");
        // The client of MariaDB writes a backslash twice too.
        let seen =
            rig.mysql(&format!(r"SELECT 'a\\\', \'\'b', balance FROM accounts WHERE id = {id}"));
        assert_eq!(seen, "a\\\\', ''b\t1000", "{id}");
    }
}

//! The conformance suite on PostgreSQL: on the backend's own connections, on an application's pool of one whose transactions are
//! stricter than they should be, and through a pooler in transaction mode.

mod harness;

use std::process::ExitCode;

use harness::PostgresHarness;
use harness::Way;
use queue_conformance::Suite;

fn main() -> ExitCode {
    let without = std::env::var("TEST_WITHOUT").unwrap_or_default();
    let is_left_out = |server: &str| without.split(',').any(|name| name.trim() == server);
    if is_left_out("postgres") {
        println!("conformance postgres: EXCLUDED by TEST_WITHOUT");
        return ExitCode::SUCCESS;
    }
    let suite =
        Suite::new().harness(PostgresHarness::new(Way::Own)).harness(PostgresHarness::new(Way::ApplicationPool));
    if is_left_out("pgbouncer") {
        println!("conformance postgres-pooler: EXCLUDED by TEST_WITHOUT");
        return suite.run();
    }
    suite.harness(PostgresHarness::new(Way::Pooler)).run()
}

//! The list of cases agrees with the documentation of the trait, and with the failures that must be ruled out.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use queue_conformance::Case;
use queue_conformance::cases;

/// The tests that every implementation of such a contract has had.
const KNOWN: [(&str, &str); 28] = [
    ("S1", "a completed job is not resurrected after a stale scan"),
    ("S2", "a newer running attempt of another owner is not overwritten by the snapshot of an older one"),
    ("S3", "a re-claimed job is not released from an obsolete claimed snapshot"),
    ("S4", "an old executor cannot complete, fail, retry, snooze or cancel a newer execution"),
    ("S5", "a matching conditional update succeeds"),
    ("S6", "a matching conditional update that changes nothing succeeds"),
    ("S7", "a newer execution in the same state fails the comparison"),
    ("S8", "the lazy backend delegates the conditional update, and everything else"),
    ("S9", "genuine backend failures are not swallowed, neither by a transition nor by a sweep"),
    ("S10", "a claim that was never handed over survives a heartbeat within the grace, and is released past it"),
    ("S11", "a settlement whose connection was terminated is retried and lands once"),
    ("S12", "a replayed release after the same owner claimed again is fenced"),
    ("S13", "a replayed registration of a wait does not release a later claim"),
    ("S14", "a claim, and a heartbeat, are not repeated after an ambiguous error"),
    ("S15", "a stale attempt cannot finalise"),
    ("S16", "every claim gets a new lease and token; both end with the claim, on every path"),
    ("S17", "in-progress rows without a lease are not stale at once; their worker's result is recorded"),
    ("S18", "a late caller never gets an expired lease"),
    ("S19", "contention on a hot row never yields an expired lease, and the last attempt's outcome commits"),
    ("S20", "the same job enqueued twice is active once"),
    ("S21", "a delayed release and a refund touch no hidden or other row"),
    ("S22", "randomly replayed histories agree with the reference"),
    ("S23", "duplicate workers perform one step once; its claim is refused to a stale one before the effect"),
    ("S24", "an event and its timeout have one winner; a timer of an earlier wait changes nothing"),
    ("S25", "only one active execution per key, suspended ones included"),
    ("S26", "a claimed continuation is repaired after a crash, a delivered one is not replayed"),
    ("S27", "a migration that meets violations fails and changes nothing"),
    ("S28", "an upgrade keeps waiting and running rows, and its indexes are valid"),
];

/// What is no backend's business, or only one's, and so is a test elsewhere.
const ELSEWHERE: [(&str, &str, &str); 6] = [
    ("S8", "queue-core/tests/failures.rs", "a_lazy_backend_connects_once"),
    ("S11", "tests/facade/faults.rs", "an_outcome_whose_answer_is_lost_is_recognised"),
    ("S14", "tests/facade/faults.rs", "a_claim_is_repeated_if_the_store_was_busy_and_never_if_its_outcome_is_unknown"),
    ("S14", "tests/facade/lease.rs", "a_failed_heartbeat_is_no_loss_and_is_not_repeated"),
    ("S27", "backend-sqlite/tests/migrations.rs", "a_migration_that_meets_what_is_in_its_way_changes_nothing"),
    ("S28", "backend-sqlite/tests/migrations.rs", "jobs_of_the_first_schema_go_on"),
];

fn text(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn every_case_has_a_name_and_a_clause_of_its_own() {
    let all = cases();
    let ids: BTreeSet<_> = all.iter().map(|case| case.id).collect();
    let clauses: BTreeSet<_> = all.iter().map(|case| case.clause).collect();
    assert_eq!((ids.len(), clauses.len()), (all.len(), all.len()), "ids and clauses are unique");
    assert!(all.len() >= 100);
    for Case { id, clause, .. } in all {
        assert!(clause.ends_with('.') && !clause.contains('\n'), "{id}: a clause is one sentence: {clause}");
        let group = id.split_once("::").map(|(group, _)| group);
        let file = format!("conformance/src/cases/{}.rs", group.unwrap_or_default());
        assert!(text(&file).contains(id.rsplit("::").next().unwrap_or_default()), "{id} stands in {file}");
    }
}

/// Where the contract stands.
const TRAITS: [&str; 2] = ["queue-core/src/backend.rs", "queue-core/src/steps.rs"];

/// `group::name` wherever it stands in the documentation, and whole groups.
#[test]
fn what_the_trait_names_exists() {
    let all = cases();
    let ids: BTreeSet<_> = all.iter().map(|case| case.id).collect();
    let groups: BTreeSet<_> = ids.iter().filter_map(|id| id.split_once("::")).map(|(group, _)| group).collect();
    let mut named = 0;
    for file in TRAITS.into_iter().chain(["docs/guarantees.md", "docs/custom-backend.md"]) {
        for quoted in text(file).split('`').skip(1).step_by(2) {
            let Some((group, _)) = quoted.split_once("::") else { continue };
            if groups.contains(group) && !quoted.contains(' ') {
                named += 1;
                assert!(ids.contains(quoted), "{file} names the case {quoted}, which does not exist");
            }
        }
    }
    assert!(named > 40, "the traits name the cases that check them; found {named}");
    let documented = TRAITS.map(text).concat();
    for group in groups.iter().filter(|group| !["model", "settle"].contains(group)) {
        let is_named = documented.contains(&format!("`{group}::")) || documented.contains(&format!("`{group}`"));
        assert!(is_named, "the traits name no case of group {group}");
    }
}

#[test]
fn every_known_failure_is_ruled_out() {
    let covered: BTreeSet<_> = cases().iter().flat_map(|case| case.covers).copied().collect();
    for (id, what) in KNOWN {
        let elsewhere = ELSEWHERE.iter().filter(|(row, ..)| *row == id);
        for (_, file, test) in elsewhere.clone() {
            assert!(text(file).contains(&format!("fn {test}(")), "{id}: {file} has no test {test}");
        }
        assert!(covered.contains(id) || elsewhere.count() > 0, "{id}, {what}: no case and no test");
    }
}

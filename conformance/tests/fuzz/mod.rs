//! What the property tests of all crates share: how many cases they try, and text that is nearly right.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use proptest::prelude::*;
use proptest::test_runner::Config;
use proptest::test_runner::RngSeed;

/// So many cases, the same in every run, unless `PROPTEST_CASES` and `PROPTEST_RNG_SEED` say otherwise.
pub(crate) fn config(cases: u32) -> Config {
    let told = Config::default();
    Config {
        cases: if std::env::var_os("PROPTEST_CASES").is_some() { told.cases } else { cases },
        rng_seed: match told.rng_seed {
            RngSeed::Random => RngSeed::Fixed(0x5eed),
            seed => seed,
        },
        failure_persistence: None,
        ..told
    }
}

/// What a character, or a piece of text, becomes.
#[derive(Clone, Debug)]
enum Edit {
    Remove(usize),
    Insert(usize, String),
    Replace(usize, String),
    /// The text from here on stands there twice.
    Double(usize),
    /// The text ends here.
    Cut(usize),
}

impl Edit {
    fn apply(&self, text: &mut String) {
        let places: Vec<_> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
        let (Self::Remove(at) | Self::Insert(at, _) | Self::Replace(at, _) | Self::Double(at) | Self::Cut(at)) = self;
        let place = at % places.len();
        let (from, to) = (places[place], places.get(place + 1).copied().unwrap_or(text.len()));
        match self {
            Self::Remove(_) => text.replace_range(from..to, ""),
            Self::Insert(_, piece) => text.insert_str(from, piece),
            Self::Replace(_, piece) => text.replace_range(from..to, piece),
            Self::Double(_) => {
                let rest = text[from..].to_owned();
                text.push_str(&rest);
            }
            Self::Cut(_) => text.truncate(from),
        }
    }
}

/// One of the texts with a few edits, the pieces among them; or any text at all.
pub(crate) fn mutated(
    texts: &'static [&'static str],
    pieces: &'static [&'static str],
) -> impl Strategy<Value = String> {
    let piece = || {
        prop_oneof![
            3 => proptest::sample::select(pieces).prop_map(str::to_owned),
            1 => any::<char>().prop_map(String::from),
        ]
    };
    let at = || any::<u16>().prop_map(usize::from);
    let edit = prop_oneof![
        2 => at().prop_map(Edit::Remove),
        3 => (at(), piece()).prop_map(|(at, piece)| Edit::Insert(at, piece)),
        3 => (at(), piece()).prop_map(|(at, piece)| Edit::Replace(at, piece)),
        1 => at().prop_map(Edit::Double),
        1 => at().prop_map(Edit::Cut),
    ];
    let edited = (proptest::sample::select(texts), proptest::collection::vec(edit, 0..6)).prop_map(|(text, edits)| {
        let mut text = text.to_owned();
        for edit in edits {
            edit.apply(&mut text);
        }
        text
    });
    prop_oneof![9 => edited, 1 => any::<String>()]
}

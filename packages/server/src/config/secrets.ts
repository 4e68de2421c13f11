const mask = '***'

// Greedy up to the last @ of the word, so that a password with an unencoded / or @ is hidden completely. Hiding too much
// of an odd URL is a nuisance; hiding too little is a leak.
const userPassword = /(:\/\/[^\s:/@?#]*):\S*@/gu
const passwordParameter = /([?&](?:password|pass|sslpassword|token|secret|api_?key)=)[^&\s#]*/giu

/** Hides the passwords of every URL inside a text. */
export function maskUrlPasswords(text: string): string {
  if (!text.includes('://')) return text
  return text.replace(userPassword, `$1:${mask}@`).replace(passwordParameter, `$1${mask}`)
}

/** How a secret is shown: only that it is set. */
export const maskedSecret = mask

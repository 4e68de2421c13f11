const mask = '***'

// Greedy up to the last @ of the word: a password with an unencoded / or @ is still hidden whole. Hiding too much of an
// odd URL costs a little reading; hiding too little leaks.
const userPassword = /(:\/\/[^\s:/@?#]*):\S*@/gu
const passwordParameter = /([?&](?:password|pass|sslpassword|token|secret|api_?key)=)[^&\s#]*/giu

/** Hides the passwords of every URL inside a text. */
export function maskUrlPasswords(text: string): string {
  if (!text.includes('://')) return text
  return text.replace(userPassword, `$1:${mask}@`).replace(passwordParameter, `$1${mask}`)
}

/** How a secret is shown: that it is set, nothing of it. */
export const maskedSecret = mask
